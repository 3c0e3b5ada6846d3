"""A trainer that learns by policy gradients and can give its memory up. Known to the driver by name only."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from generation.freeing import give_back
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory, WeightPublisher


class Learner:
    """Has its samples consist of small ids: the share of these is the reward.

    Args:
        config: The model's configuration.
        directory: Where its versions are found.
        folder: What it was is kept here while it sleeps on a CPU, and found here by who replaces it.
        asleep: Whether it has neither model nor optimizer before `onload`.
    """

    def __init__(
        self, config: Mapping[str, Any], directory: WeightDirectory, folder: str, asleep: bool = False
    ) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config, self.file = dict(config), Path(folder) / "learner.pt"
        self.publisher = WeightPublisher(directory=directory)
        self.model: Any = None
        self.optimizer: Any = None
        if not asleep:
            self.onload()

    def publish_weights(self) -> int:
        """Publish the weights; they lie in the host's shared memory then. Tells which version they are."""
        return self.publisher.publish(self.model.state_dict()).version

    def learn(self, prompts: torch.Tensor, samples: BatchedDataDict) -> float:
        """Make what was better than the rest likelier; gives the mean reward.

        Args:
            prompts: int64, [prompts, length].
            samples: What a generator made of them, all of the same length.
        """
        outputs = torch.stack(list(samples["output_ids"]))
        rewards = (outputs < self.config["vocab_size"] // 2).float().mean(-1)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        tokens = torch.cat([prompts[samples["prompt_index"]], outputs], -1).to(self.device)
        logprobs = self.model(tokens[:, :-1]).logits.log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, 1:, None])[:, prompts.shape[1] - 1 :, 0]
        loss = -(advantages.to(self.device)[:, None] * chosen).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(rewards.mean())

    def learn_and_publish(self, prompts: torch.Tensor, samples: BatchedDataDict) -> float:
        """`learn`, and publish: in one call, as who replaces this process does not know what it learnt."""
        reward = self.learn(prompts, samples)
        self.publish_weights()
        return reward

    def offload(self) -> None:
        """Give the memory up: a device's for the host's; where there is no device, the host's for a file."""
        if self.model is None:
            return
        self.optimizer.zero_grad()  # gradients are not kept
        if self.device.type == "cpu":
            torch.save(
                [self.model.state_dict(), self.optimizer.state_dict()], part := self.file.with_suffix(".part")
            )
            part.replace(self.file)
            self.model = self.optimizer = None
            give_back()
        else:
            self._move("cpu")
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Take the memory again."""
        if self.model is not None:
            self._move(self.device)
            return
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config)).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        if self.file.exists():
            weights, moments = torch.load(self.file, map_location=self.device, weights_only=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
        self.model, self.optimizer = model, optimizer

    def explain(self) -> str:
        """What its sleep is."""
        where = "a file, as there is no device" if self.device.type == "cpu" else "the host's memory"
        return f"a trainer on {self.device.type}; to sleep is to move weights and optimizer state to {where}"

    def _move(self, device: Any) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[name] = value.to(device)
