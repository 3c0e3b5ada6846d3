"""Weights through Ray's object store, between actors of two simulated nodes."""

import pytest
import torch
from actors import wait_for_end

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    DirectoryLostError,
    StaleVersionError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    sync_weights,
)

ray = pytest.importorskip("ray")


class Trainer:
    def __init__(self):
        self.publisher = WeightPublisher(bucket_bytes=1 << 20)
        self.value = 0

    def publish_weights(self):
        self.value += 1
        return self.publisher.publish(state(self.value))

    def latest(self):
        return self.publisher.latest


class Generator:
    def __init__(self, borrow=False):
        self.loaded = {}
        self.receiver = WeightReceiver(self._load, borrow=borrow)

    def _load(self, tensors):
        for name, tensor in tensors:
            self.loaded[name] = tensor.clone()

    def apply_weights(self, update):
        return self.receiver.apply(update, timeout_s=60)

    def holds(self, value):
        want = state(value)
        return self.receiver.version, want.keys() == self.loaded.keys() and all(
            torch.equal(want[name], self.loaded[name]) for name in want
        )


def state(value):
    found = {f"layer.{i}": torch.full((256, 1024), value + i, dtype=torch.bfloat16) for i in range(12)}
    return found | {"head": found["layer.0"], "bias": torch.tensor(float(value))}


class Results(list):
    def get_results(self, *, timeout=None):
        return ray.get(list(self), timeout=timeout)


class Peers:
    def __init__(self, actors):
        self.actors = actors
        self.ranks = range(len(actors))

    def call(self, method, *args, **kwargs):
        return Results([getattr(actor, method).remote(*args, **kwargs) for actor in self.actors])

    def on(self, *, ranks):
        return Peers([self.actors[rank] for rank in ranks])


def start(cls, node, *args):
    return ray.remote(cls).options(num_cpus=0, resources={node: 1}).remote(*args)


@pytest.fixture(scope="module")
def crew(ray_cluster):
    trainer = Peers([start(Trainer, "node0")])
    generators = Peers([start(Generator, "node0"), start(Generator, "node1", True)])
    yield trainer, generators
    for actor in trainer.actors + generators.actors:
        ray.kill(actor)


def test_weights_reach_generators_on_both_nodes(crew):
    trainer, generators = crew
    for version in (1, 2, 3):
        report = sync_weights(trainer, generators, timeout_s=240)
        assert report.version == version
        assert report.size_bytes > 12 * 256 * 1024 * 2
        assert generators.call("holds", version).get_results() == [(version, True)] * 2


def test_a_dead_trainer_is_named_and_the_previous_version_stays(crew):
    trainer, generators = crew
    before = sync_weights(trainer, generators, timeout_s=240).version
    update = ray.get(trainer.actors[0].publish_weights.remote())
    ray.kill(trainer.actors[0])
    wait_for_end(trainer.actors[0].latest.remote)
    remote = Peers(generators.actors[1:])
    with pytest.raises(BucketFetchError, match="cannot be had"):
        remote.call("apply_weights", update).get_results(timeout=240)
    assert remote.call("holds", before).get_results() == [(before, True)]


def test_waiting_for_bytes_has_a_deadline(ray_cluster):
    @ray.remote
    def never():
        import threading

        threading.Event().wait(60)

    from raycrew.tensor_transport._ray import RayByteStore

    ref = never.options(num_cpus=0).remote()
    with pytest.raises(TransportTimeoutError):
        RayByteStore().get(ref, 0.1)
    ray.cancel(ref, force=True)


@pytest.mark.long  # in short: integration-tests/test_weight_updates
def test_versions_stream_through_a_directory_to_both_nodes(ray_cluster):
    """The driver publishes; a generator on each node fetches meanwhile, and one comes late."""
    with WeightDirectory.start(keep=2, name="weights", fanout=1) as directory:
        publisher = WeightPublisher(directory=WeightDirectory.find("weights"), bucket_bytes=1 << 20)
        generators = Peers(
            [start(Following, "node0", directory), start(Following, "node1", directory)],
        )
        try:
            pulled = generators.call("apply", 1)
            publisher.publish(state(1))
            assert pulled.get_results(timeout=240) == [1, 1]
            assert generators.call("holds", 1).get_results(timeout=240) == [(1, True)] * 2
            (version,) = [s for s in directory.status() if s.state == "committed"]
            assert len(version.holders) == 2
            newer = WeightPublisher(directory=directory, bucket_bytes=1 << 20)
            with pytest.raises(StaleVersionError, match="was replaced by"):
                publisher.publish(state(2))
            newer.publish(state(2))
            assert generators.call("pull").get_results(timeout=240) == [2, 2]
            assert generators.call("holds", 2).get_results(timeout=240) == [(2, True)] * 2
        finally:
            for actor in generators.actors:
                ray.kill(actor)
    with pytest.raises(DirectoryLostError, match="does not answer"):
        newer.publish(state(3))


class Following(Generator):
    def __init__(self, directory):
        super().__init__()
        self.receiver = WeightReceiver(self._load, directory=directory, rollback="refetch")

    def apply(self, version):
        return self.receiver.apply(version, timeout_s=240).version

    def pull(self):
        return self.receiver.pull(timeout_s=240).version
