"""PPO with actor, critic and frozen reference as worker groups: `python examples/ppo/run.py [--quick]`.

A prompt is four digits, the answer is the prompt reversed. The actor samples answers, a rule scores each
digit, the critic estimates what is still to come, and the reference keeps the actor from drifting. All three
are groups of two ranks on the same two bundles; gradients are averaged over ranks with gloo.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import one_hot

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.tensor_transport import BatchedDataDict
from raycrew.worker_groups import CurrentWorker, NamedSharding, RayWorkerGroup, replicated, sharded

DIGITS, LENGTH = 6, 4


class Network(nn.Module):
    """A prompt's digits in, `outputs` numbers for each place of the answer out."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.layers = nn.Sequential(
            nn.Linear(LENGTH * DIGITS, 64), nn.Tanh(), nn.Linear(64, LENGTH * outputs)
        )

    def forward(self, prompts: Tensor) -> Tensor:
        """(rows, LENGTH) of digits to (rows, LENGTH, outputs)."""
        digits = one_hot(prompts, DIGITS).flatten(1).float()
        return cast("Tensor", self.layers(digits)).view(-1, LENGTH, self.outputs)


def logprobs_of(network: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """Log-probability of each digit of the answers."""
    logits = cast("Tensor", network(prompts))
    return logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]


class Learner:
    """A network that is trained on all ranks at once."""

    def __init__(self, outputs: int, seed: int, learning_rate: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)  # alike on all ranks, so that all begin with the same weights
        self.network = Network(outputs)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)

    def on_generation(self, worker: CurrentWorker) -> None:
        """Meet the other ranks; from here on each samples for itself."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo")
        torch.manual_seed(worker.rank)

    def step(self, loss: Tensor) -> float:
        """One step along the mean of all ranks' gradients."""
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        for parameter in self.network.parameters():
            dist.all_reduce(parameter.grad)
            cast("Tensor", parameter.grad).div_(dist.get_world_size())
        self.optimizer.step()
        return loss.item()


class Actor(Learner):
    """The policy: samples answers, and learns from them."""

    @replicated
    def weights(self) -> dict[str, Tensor]:
        """The weights; all ranks have the same."""
        return self.network.state_dict()

    @sharded("dp")
    def generate(self, prompts: BatchedDataDict) -> BatchedDataDict:
        """Answers to the prompts, with the log-probability of each digit."""
        with torch.no_grad():
            chances = self.network(prompts["prompts"]).softmax(-1)
            answers = torch.multinomial(chances.flatten(0, 1), 1).view(-1, LENGTH)
            old = logprobs_of(self.network, prompts["prompts"], answers)
        return BatchedDataDict({"prompts": prompts["prompts"], "answers": answers, "logprobs": old})

    @sharded("dp", split="batch", collect="mean")
    def train(self, batch: BatchedDataDict, epochs: int, clip: float) -> float:
        """Steps along PPO's clipped objective; gives the last loss."""
        loss = 0.0
        for _ in range(epochs):
            new = logprobs_of(self.network, batch["prompts"], batch["answers"])
            ratio, gain = (new - batch["logprobs"]).exp(), batch["advantages"]
            loss = self.step(-torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean())
        return loss


class Critic(Learner):
    """Estimates the return from each place of an answer on."""

    @sharded("dp")
    def values(self, batch: BatchedDataDict) -> BatchedDataDict:
        """The estimates, as a column `values`."""
        with torch.no_grad():
            return BatchedDataDict({"values": self.network(batch["prompts"])[..., 0]})

    @sharded("dp", split="batch", collect="mean")
    def train(self, batch: BatchedDataDict, epochs: int) -> float:
        """Steps towards the returns that were seen; gives the last loss."""
        loss = 0.0
        for _ in range(epochs):
            values = self.network(batch["prompts"])[..., 0]
            loss = self.step((values - batch["returns"]).square().mean())
        return loss


class Reference:
    """The policy as it was before training."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        torch.set_num_threads(1)
        self.network = Network(DIGITS)
        self.network.load_state_dict(weights)

    @sharded("dp")
    def score(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Its log-probabilities, as a column `reference`."""
        with torch.no_grad():
            return BatchedDataDict(
                {"reference": logprobs_of(self.network, batch["prompts"], batch["answers"])}
            )


def advantages_of(rewards: Tensor, values: Tensor, decay: float = 0.95) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016), place by place from the end."""
    advantages, ahead = torch.zeros_like(rewards), torch.zeros(len(rewards))
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], 1)
    errors = rewards + following - values
    for place in reversed(range(LENGTH)):
        ahead = errors[:, place] + decay * ahead
        advantages[:, place] = ahead
    return advantages


def learn(cluster: RayVirtualCluster, steps: int, rows: int = 256, kl_weight: float = 0.02) -> list[float]:
    """Train for some steps; gives the share of right digits in each."""
    group = partial(RayWorkerGroup, cluster, sharding_annotations=NamedSharding([0, 1], ["dp"]))
    torch.manual_seed(0)
    curve = []
    with (
        group(Actor, outputs=DIGITS, seed=1, learning_rate=0.01) as actor,
        group(Critic, outputs=1, seed=2, learning_rate=0.01) as critic,
        group(Reference, weights=actor.call(Actor.weights)) as reference,
    ):
        for _ in range(steps):
            prompts = torch.randint(DIGITS, (rows, LENGTH))
            batch = actor.call(Actor.generate, BatchedDataDict({"prompts": prompts})).get_results()
            scoring, valuing = reference.call(Reference.score, batch), critic.call(Critic.values, batch)
            batch = batch.union(scoring.get_results()).union(valuing.get_results())
            right = (batch["answers"] == prompts.flip(1)).float()
            rewards = right - kl_weight * (batch["logprobs"] - batch["reference"])
            advantages = advantages_of(rewards, batch["values"])
            batch["returns"] = advantages + batch["values"]
            batch["advantages"] = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
            learning = actor.call(Actor.train, batch, epochs=4, clip=0.2)
            critic.call(Critic.train, batch, epochs=4).get_results(timeout=120)
            learning.get_results(timeout=120)
            curve.append(right.mean().item())
    return curve


def main() -> None:
    """Read the options, train, and show the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="5 steps, to see that everything works")
    parser.add_argument("--json", type=Path, help="also write the curve to this file")
    options = parser.parse_args()
    with (
        init_ray(num_cpus=6),
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=3) as cluster,
    ):
        curve = learn(cluster, 5 if options.quick else options.steps)
    for step in range(0, len(curve), max(1, len(curve) // 12)):
        Console().print(f"step {step:3}  {curve[step]:.2f}  " + "█" * round(40 * curve[step]))
    if options.json:
        options.json.write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
