"""The policy workers: one model replica per rank, trained in step with the others."""

import copy
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo.config import RunConfig
from grpo.model import build_model, build_tokenizer, local_device, token_logprobs
from grpo.objective import grpo_loss
from grpo.task import SortingTask
from raycrew.tensor_transport import BatchedDataDict, WeightPublisher, WeightUpdate


class PolicyWorker:
    """One data-parallel rank of the policy.

    Args:
        config: The whole run's configuration, the same on every rank.
    """

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.device = local_device()
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", init_method="env://")
        self.rng = random.Random(f"{config.seed}/{dist.get_rank()}")
        self.task = SortingTask(config.digits, config.seed)
        self.tokenizer = build_tokenizer()
        self.model = build_model(config.model, config.seed).to(self.device)
        self.replica = DistributedDataParallel(self.model)
        self.reference = self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.warmup.learning_rate, weight_decay=0
        )
        self.publisher = WeightPublisher()

    def warm_up(self, prompts: Sequence[str], steps: int) -> float:
        """Some supervised steps on answers of the right form in random order; the last loss.

        Args:
            prompts: This rank's share of the training prompts.
            steps: How many optimiser steps to take.
        """
        share = self.config.warmup.batch_size // dist.get_world_size()
        loss = torch.zeros(())
        for _ in range(steps):
            chosen = self.rng.choices(prompts, k=share)
            texts = [prompt + self.task.shuffled_example(prompt, self.rng) for prompt in chosen]
            ids = self.tokenizer(texts)["input_ids"]
            tokens = torch.tensor([[*row, self.tokenizer.eos_token_id] for row in ids], device=self.device)
            answer = token_logprobs(self.replica, tokens)[:, self.config.digits :]
            loss = -answer.mean()
            self._step(loss)
        return self._mean(loss)

    def start_grpo(self) -> None:
        """Freeze what was learnt so far as the reference, and start a new optimiser."""
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.grpo.learning_rate, weight_decay=0
        )

    def train(self, batch: BatchedDataDict) -> dict[str, float]:
        """Learn from this rank's share of a round.

        Args:
            batch: `tokens`, `mask`, `logprobs` as a generator returns them, and `advantages`, one per row.

        Returns:
            Means over all ranks: `loss`, `kl`, `clipped`, and `logprob_difference`, the largest difference
            between the generator's log-probabilities and this policy's own before it learnt anything.
        """
        tokens, mask, behaviour, advantages = (
            batch[key].to(self.device) for key in ("tokens", "mask", "logprobs", "advantages")
        )
        mask, behaviour = mask[:, 1:], behaviour[:, 1:]
        with torch.no_grad():
            own = token_logprobs(self.model, tokens)
            reference = token_logprobs(self.reference, tokens)
        sums: dict[str, torch.Tensor] = {}
        minibatches = torch.arange(len(tokens), device=self.device).chunk(self.config.grpo.minibatches)
        for rows in minibatches:
            parts = grpo_loss(
                token_logprobs(self.replica, tokens[rows]),
                behaviour[rows],
                reference[rows],
                advantages[rows],
                mask[rows],
                clip=self.config.grpo.clip,
                kl_weight=self.config.grpo.kl_weight,
            )
            self._step(parts.loss)
            for name, value in parts.metrics().items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value / len(minibatches)
        metrics = {name: self._mean(value) for name, value in sums.items()}
        difference = ((own - behaviour).abs() * mask).max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        return {**metrics, "logprob_difference": difference.item()}

    def publish_weights(self) -> WeightUpdate | None:
        """Publish the policy's weights as the next version: rank 0 does, as all ranks hold the same."""
        return self.publisher.publish(self.model.state_dict()) if dist.get_rank() == 0 else None

    def close(self) -> None:
        """Leave the process group and give the published weights up."""
        self.publisher.close()
        dist.destroy_process_group()

    def _step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _mean(self, value: torch.Tensor) -> float:
        """The mean of a scalar over all ranks."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).item()
