"""The policy workers: one model replica per rank, trained in step with the others."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo.config import RunConfig
from grpo.errors import ExampleError
from grpo.learner import Learner, State
from grpo.model import local_device, token_logprobs
from grpo.objective import grpo_loss
from grpo.task import SortingTask
from grpo.vocabulary import END, encode
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory, WeightPublisher, WeightUpdate
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.worker_groups import CurrentWorker, current_worker

PATIENCE = timedelta(minutes=2)
ARENA_BYTES = 8 << 20
"""Some versions of the weights fit into this: they go by the memory of the machine that has both groups."""


class PolicyWorker:
    """One data-parallel rank of the policy.

    After each chunk of the warm-up and each round it keeps a copy of what it has learnt. When a rank has
    died, all go on from the copy of whoever is furthest, and what was interrupted is asked for again: who has
    done it already then only tells what came out.

    Args:
        config: The whole run's configuration, the same on every rank.
        directory: Where versions of the weights are announced.
        asleep: Whether nothing of it is on the device before `onload`.
    """

    def __init__(self, config: RunConfig, directory: WeightDirectory, asleep: bool = False) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.device = local_device()
        self.task = SortingTask(config.digits, config.seed)
        rank = current_worker().rank
        self.learner = Learner(config, rank, self.device)
        self.kept: State = {**self.learner.state(), "random": {}, "done": [0, 0], "metrics": {}}
        store = SharedMemoryTransport(arena_bytes=ARENA_BYTES)
        self.publisher = WeightPublisher(store, directory=directory) if rank == 0 else None
        self.replica: Any = None  # while it is asleep
        self.is_asleep = False
        if asleep:
            self.offload()

    def on_generation(self, worker: CurrentWorker) -> None:
        """Meet the other ranks, at the start and whenever one of them is new."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=PATIENCE)
        done = [[0, 0]] * worker.world_size
        dist.all_gather_object(done, self.kept["done"])
        kept = [self.kept]
        dist.broadcast_object_list(kept, src=done.index(max(done)))
        self.restore(kept[0])
        if not self.is_asleep:
            self._join()

    def offload(self) -> None:
        """Have all that is learnt with lie in the host's memory; on a CPU that is where it lies anyway."""
        self.replica, self.is_asleep = None, True
        self.learner.move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Have it lie on the device again; all ranks at once, for they go on in step."""
        self.is_asleep = False
        if self.replica is None:  # so it is, too, where this was tried before and failed
            self.learner.move(self.device)
            self._join()

    def warm_up(self, prompts: Sequence[str], start: int, steps: int) -> float:
        """Some supervised steps on answers of the right form in random order; the last loss.

        Args:
            prompts: This rank's share of the training prompts.
            start: How many optimiser steps were taken before.
            steps: How many to take.
        """
        if self._has_done([start, 0], [start + steps, 0]):
            return float(self.kept["metrics"]["loss"])
        share = self.config.warmup.batch_size // dist.get_world_size()
        loss = torch.zeros(())
        for _ in range(steps):
            chosen = self.learner.rng.choices(prompts, k=share)
            texts = [prompt + self.task.shuffled_example(prompt, self.learner.rng) for prompt in chosen]
            tokens = torch.tensor([[*encode(text), END] for text in texts], device=self.device)
            answer = token_logprobs(self.replica, tokens)[:, self.config.digits :]
            loss = -answer.mean()
            self.learner.step(loss)
        if start + steps == self.config.warmup.steps:
            self.learner.freeze()
        return self._keep([start + steps, 0], {"loss": self._mean(loss)})["loss"]

    def train(self, batch: BatchedDataDict, step: int) -> dict[str, float]:
        """Learn from this rank's share of a round.

        Args:
            batch: `tokens`, `mask` and `logprobs` as in `completions_of`, and `advantages`, one per row.
            step: Which round it is, from 1 on.

        Returns:
            Means over all ranks: `loss`, `kl`, `clipped`, and `logprob_difference`, the largest difference
            between the generator's log-probabilities and this policy's own before it learnt anything: where
            the generator has older weights, what was learnt since is part of it.
        """
        warm_up = self.config.warmup.steps
        if self._has_done([warm_up, step - 1], [warm_up, step]):
            return dict(self.kept["metrics"])
        tokens, mask, behaviour, advantages = (
            batch[key].to(self.device) for key in ("tokens", "mask", "logprobs", "advantages")
        )
        mask, behaviour = mask[:, 1:], behaviour[:, 1:]
        with torch.no_grad():
            own = token_logprobs(self.learner.model, tokens)
            reference = token_logprobs(self.learner.reference, tokens)
        sums: dict[str, torch.Tensor] = {}
        minibatches = torch.arange(len(tokens), device=self.device).chunk(self.config.grpo.minibatches)
        for rows in minibatches:
            parts = grpo_loss(
                token_logprobs(self.replica, tokens[rows]),
                own[rows],
                behaviour[rows],
                reference[rows],
                advantages[rows],
                mask[rows],
                clip=self.config.grpo.clip,
                truncate=self.config.grpo.truncate,
                kl_weight=self.config.grpo.kl_weight,
            )
            self.learner.step(parts.loss)
            for name, value in parts.metrics().items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value / len(minibatches)
        metrics = {name: self._mean(value) for name, value in sums.items()}
        difference = ((own - behaviour).abs() * mask).max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        return self._keep([warm_up, step], {**metrics, "logprob_difference": difference.item()})

    def publish_weights(self) -> WeightUpdate | None:
        """Publish the policy's weights as the next version: rank 0 does, as all ranks hold the same.

        A generator that is never to learn gets those that the warm-up ended with.
        """
        if self.publisher is None:
            return None
        model = self.learner.model if self.config.synchronise else self.learner.reference
        return self.publisher.publish(model.state_dict())

    def state(self) -> State:
        """What was learnt by the end of the last round, for `restore`."""
        return self.kept

    def restore(self, state: State) -> None:
        """Go on from there."""
        self.kept = state
        self.learner.load(state)
        if (own := state["random"].get(self.learner.rank)) is not None:
            self.learner.load_random_state(own)

    def done(self) -> list[int]:
        """How many steps of the warm-up and how many rounds the policy has learnt from."""
        return list(self.kept["done"])

    def pid(self) -> int:
        """This worker's process."""
        return os.getpid()

    def close(self) -> None:
        """Leave the process group and give the published weights up."""
        if self.publisher is not None:
            self.publisher.close()
        dist.destroy_process_group()

    def _join(self) -> None:
        # What buffers it has, of positions, are never written to, and need not be sent before each step.
        self.replica = DistributedDataParallel(self.learner.model)
        self.replica.broadcast_buffers = False  # They stay as they are; the argument has two names in torch.

    def _has_done(self, before: list[int], after: list[int]) -> bool:
        """Whether what leads from one place to another is done already.

        Raises:
            ExampleError: The policy is somewhere else: no rank survived that had got so far.
        """
        done = self.kept["done"]
        if done not in (before, after):
            raise ExampleError(f"the policy is at round {done[1]} (warm-up {done[0]}), not at {before[1]}")
        return bool(done == after)

    def _keep(self, done: list[int], metrics: dict[str, float]) -> dict[str, float]:
        random = [{}] * dist.get_world_size()
        dist.all_gather_object(random, self.learner.random_state())
        numbered = dict(enumerate(random))
        self.kept = {**self.learner.state(), "random": numbered, "done": done, "metrics": metrics}
        return metrics

    def _mean(self, value: torch.Tensor) -> float:
        """The mean of a scalar over all ranks."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).item()
