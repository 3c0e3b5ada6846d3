"""The main example's groups in this process, with workers that know nothing and learn nothing."""

import sys
from contextlib import contextmanager

import torch
from grpo_runs import EXAMPLE

sys.path.insert(0, str(EXAMPLE))

from grpo.crew import Crew
from grpo.deaths import Deaths
from raycrew.cluster_core.testing import FakeCluster
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.worker_groups import NamedSharding, current_worker
from raycrew.worker_groups.testing import InProcessGroup

STORE = InProcessByteStore()


class Generator:
    """Completes each prompt in the same way, and says with which version."""

    def __init__(self, directory):
        self.receiver = WeightReceiver(dict, store=STORE, directory=directory)

    def apply_weights(self, version):
        return self.receiver.apply(version)

    def generate(self, prompts, *, samples, temperature, seed):
        rows = len(prompts) * samples
        return BatchedDataDict(
            {
                "tokens": torch.full((rows, 4), seed),
                "mask": torch.ones(rows, 4),
                "logprobs": torch.zeros(rows, 4),
                "prompts": [prompt for prompt in prompts for _ in range(samples)],
                "completions": [f"{temperature}"] * rows,
                "weight_version": self.receiver.tag(rows),
            }
        )


class Policy:
    """Publishes as often as it is asked."""

    def __init__(self, directory):
        self.learns = current_worker().rank == 0
        self.publisher = WeightPublisher(STORE, directory=directory) if self.learns else None

    def publish_weights(self):
        return self.publisher.publish({"weights": torch.zeros(4)}) if self.learns else None

    def train(self, batch, step):
        assert batch["tokens"].shape[0] == batch["advantages"].shape[0]
        return {"loss": 0.0, "kl": 0.0, "clipped": 0.0, "logprob_difference": 0.0}


@contextmanager
def crew_in_process(config):
    """A crew of two ranks each."""
    directory = WeightDirectory.local()
    how = {"sharding_annotations": NamedSharding([0, 1], ["data"]), "directory": directory}
    with (
        InProcessGroup(FakeCluster([2]), Policy, name_prefix="policy", **how) as policy,
        InProcessGroup(FakeCluster([2]), Generator, name_prefix="generator", **how) as generators,
    ):
        yield Crew(config, policy, generators, directory, Deaths({}, print))
