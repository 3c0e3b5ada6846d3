"""Weights through Ray's object store, between actors of two simulated nodes."""

import pytest
import torch
from actors import wait_for_end

from raycrew.tensor_transport.errors import BucketFetchError, TransportTimeoutError
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver, sync_weights

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

    from raycrew.tensor_transport._ray_compat import RayByteStore

    ref = never.options(num_cpus=0).remote()
    with pytest.raises(TransportTimeoutError):
        RayByteStore().get(ref, 0.1)
    ray.cancel(ref, force=True)
