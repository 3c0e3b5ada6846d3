"""The main example's groups in this process, with workers that know nothing and learn nothing."""

from contextlib import contextmanager

import grpo_runs  # noqa: F401 - makes the example importable
import torch

from generation import Generators
from generation.prompts import Limits
from generation.samples import Sample, pack_samples
from grpo import vocabulary
from grpo.crew import Crew
from grpo.deaths import Deaths
from raycrew.cluster_core.testing import FakeCluster
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.worker_groups import NamedSharding, current_worker
from raycrew.worker_groups.testing import InProcessGroup

STORE = InProcessByteStore()
GREEDILY, SAMPLED = "00", "11"
"""What is answered."""


class Generator:
    """Answers each prompt with how it was to be sampled, and says with which version."""

    def __init__(self, directory):
        self.receiver = WeightReceiver(dict, store=STORE, directory=directory)

    def prepare_weights(self, version):
        return self.receiver.prepare(version)

    def apply_weights(self, version):
        return self.receiver.apply(version)

    def limits(self):
        return Limits(vocabulary.SIZE, 32)

    def generate(self, batch, sampling):
        tokens = vocabulary.encode(GREEDILY if sampling.temperature == 0 else SAMPLED)
        versions = [self.receiver.require()] * len(tokens)
        found = [tokens, [0.0] * len(tokens), versions, "length"]
        return pack_samples(
            [Sample(int(i), n, *found) for i in batch["prompt_index"] for n in range(sampling.n)]
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
def crew_in_process(config, policy_class=Policy, generator_class=Generator):
    """A crew of two ranks each."""
    directory = WeightDirectory.local()
    how = {"sharding_annotations": NamedSharding([0, 1], ["data"]), "directory": directory}
    with (
        InProcessGroup(FakeCluster([2]), policy_class, name_prefix="policy", **how) as policy,
        InProcessGroup(FakeCluster([2]), generator_class, name_prefix="generator", **how) as generators,
    ):
        yield Crew(config, policy, Generators(generators), directory, Deaths({}, print))
