"""The policy: a small network that a trainer trains, and generators act by."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from episodes import PLACES
from torch import Tensor, nn
from torch.nn.functional import one_hot

from raycrew.tensor_transport import WeightPublisher, WeightReceipt, WeightReceiver, WeightUpdate
from raycrew.worker_groups import replicated

LEARNT = ("seen", "chosen", "logprobs", "reward")


class Policy(nn.Module):
    """Scores of the places, to be asked for or to be the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * (PLACES + 1), 64), nn.Tanh(), nn.Linear(64, PLACES))

    def forward(self, seen: Tensor) -> Tensor:
        """(…, 3) of low, high and turn to (…, PLACES) of log-probabilities."""
        return cast("Tensor", self.layers(one_hot(seen, PLACES + 1).flatten(-2).float())).log_softmax(-1)


class Generator:
    """Acts by the policy with the weights that it has, and says which these are."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.policy = Policy()
        self.receiver = WeightReceiver(self._load)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        state = self.policy.state_dict()
        for name, tensor in tensors:
            state[name].copy_(tensor)

    def apply_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Take the trainer's weights over."""
        return self.receiver.apply(update)

    @torch.no_grad()
    def act(self, seen: tuple[int, int, int]) -> tuple[int, float, int]:
        """A place, the log-probability of choosing it, and the version of the weights."""
        scores = self.policy(torch.tensor(seen))
        place = int(torch.multinomial(scores.exp(), 1))
        return place, float(scores[place]), self.receiver.require()


class Trainer:
    """Learns from episodes, and publishes its weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.publisher = WeightPublisher()

    def publish_weights(self) -> WeightUpdate:
        """Put the weights where generators find them."""
        return self.publisher.publish(self.policy.state_dict())

    @replicated
    def train(self, columns: dict[str, Any]) -> None:
        """Some steps along PPO's clipped objective; a turn's advantage is that of its episode."""
        seen, chosen, old, reward = (torch.tensor(columns[name]) for name in LEARNT)
        gain = ((reward - reward.mean()) / (reward.std() + 1e-6))[:, None]
        for _ in range(4):
            scores = self.policy(seen)
            ratio = (scores.gather(-1, chosen[..., None])[..., 0] - old).exp()
            entropy = -(scores.exp() * scores).sum(-1)
            clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            self.optimizer.zero_grad()
            torch.autograd.backward(-(clipped + 0.01 * entropy).mean())
            self.optimizer.step()
