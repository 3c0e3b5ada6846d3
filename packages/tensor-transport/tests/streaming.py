"""A trainer and generators whose weights stream through a directory, as threads of one process."""

from models import Model, weights

from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver, sync_weights
from raycrew.tensor_transport.weights._directory import pace

TIMEOUT_S = 120.0


class Trainer:
    """One rank, which publishes its part of the names."""

    def __init__(self, store, directory, part=0, parts=1, **options):
        self.publisher = WeightPublisher(
            store,
            directory=directory,
            part=part,
            parts=parts,
            bucket_bytes=512,
            timeout_s=TIMEOUT_S,
            **options,
        )
        self.part, self.parts, self.seed = part, parts, 0
        self.before_each = lambda name: None

    def publish_weights(self):
        def pairs():
            for name, tensor in self.mine().items():
                self.before_each(name)
                yield name, tensor

        return self.publisher.publish(pairs())

    def publish_mapping(self):
        return self.publisher.publish(self.mine())

    def mine(self):
        names = sorted(weights(self.seed))
        return {name: weights(self.seed)[name] for name in names[self.part :: self.parts]}


class Generator:
    def __init__(self, store, directory, **options):
        self.model, self.events = Model(), []
        self.before_load = lambda: None
        self.receiver = WeightReceiver(self.load, store=store, directory=directory, **options)

    def load(self, tensors):
        self.before_load()
        self.model.load(tensors)

    def prepare_weights(self, version):
        self.events.append("prepare")
        return self.receiver.prepare(version, timeout_s=TIMEOUT_S)

    def apply_weights(self, version):
        self.events.append("apply")
        return self.receiver.apply(version, timeout_s=TIMEOUT_S)

    def stop(self):
        self.events.append("stop")

    def go(self):
        self.events.append("go")


def sync(trainers, generators, directory, **options):
    options = {"timeout_s": TIMEOUT_S, "pause": "stop", "resume": "go"} | options
    return sync_weights(LocalPeers(trainers), LocalPeers(generators), directory=directory, **options)


def at_a_pace(monkeypatch, each_s):
    """Buckets are told of after so many seconds, however long an answer takes."""
    monkeypatch.setattr(pace, "_LEAST_S", each_s)
    monkeypatch.setattr(pace, "_MOST_S", 3600.0)
    monkeypatch.setattr(pace, "_TIMES", 1e-9)
