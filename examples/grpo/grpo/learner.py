"""What a policy rank learns with, and copies of it that another rank or a file can take over."""

import copy
import random
from typing import Any

import numpy as np
import torch

from grpo.config import RunConfig
from grpo.model import build_model

State = dict[str, Any]
"""Tensors on the CPU, numbers, text, and lists, tuples and dicts of them: all that a checkpoint may hold."""


class Learner:
    """A model, the frozen reference that it must not leave, its optimizer, and its random numbers.

    Args:
        config: The whole run's configuration.
        rank: Decides the random numbers.
        device: Where it learns.
    """

    def __init__(self, config: RunConfig, rank: int, device: torch.device) -> None:
        self.config, self.rank, self.device = config, rank, device
        self.model = build_model(config.model, config.seed).to(device)
        self.reference: torch.nn.Module | None = None
        self.optimizer = self._new_optimizer(config.warmup.learning_rate)
        self.rng = random.Random(f"{config.seed}/{rank}")

    def freeze(self) -> None:
        """Make what was learnt so far the reference, and start a new optimizer."""
        self.reference = self._frozen()
        self.optimizer = self._new_optimizer(self.config.grpo.learning_rate)

    def step(self, loss: torch.Tensor) -> None:
        """One step down the gradient of a loss."""
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def state(self) -> State:
        """A copy of what all ranks have in common."""
        reference = self.reference and self.reference.state_dict()
        return _copied(
            {
                "model": dict(self.model.state_dict()),
                "reference": reference and dict(reference),
                "optimizer": self.optimizer.state_dict(),
            }
        )

    def load(self, state: State) -> None:
        """Go on from what `state` returned, here or on another rank."""
        self.model.load_state_dict(state["model"])
        self.reference = None
        if state["reference"] is not None:
            self.reference = self._frozen()
            self.reference.load_state_dict(state["reference"])
        self.optimizer.load_state_dict(_copied(state["optimizer"]))  # It would write to what it is given.

    def move(self, device: torch.device) -> None:
        """Have all that it learns with lie there; gradients are not kept."""
        self.optimizer.zero_grad()
        self.model.to(device)
        if self.reference is not None:
            self.reference.to(device)
        for moments in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = moments[name].to(device)

    def random_state(self) -> State:
        """Where this rank's random numbers are."""
        name, keys, *rest = np.random.get_state()
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "python": self.rng.getstate(),
            "numpy": [name, keys.tolist(), *rest],
            "torch": torch.get_rng_state(),
            "cuda": on_device,
        }

    def load_random_state(self, state: State) -> None:
        """Have the random numbers go on from there."""
        self.rng.setstate(state["python"])
        np.random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def _frozen(self) -> torch.nn.Module:
        return copy.deepcopy(self.model).eval().requires_grad_(False)

    def _new_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
