"""The driver's side of weight updates, with groups of plain objects."""

import pytest
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver, gather_weights, sync_weights


@pytest.fixture
def store():
    return InProcessByteStore()


class Trainer:
    def __init__(self, store, rank):
        self.publisher = WeightPublisher(store) if rank == 0 else None
        self.seed = 0

    def publish_weights(self):
        if self.publisher is None:
            list(gather_weights(weights(self.seed)))
            return None
        return self.publisher.publish(weights(self.seed))

    def latest(self):
        return self.publisher and self.publisher.latest


class Generator:
    def __init__(self, store):
        self.model, self.events = Model(), []
        self.receiver = WeightReceiver(self.model.load, store=store)

    def apply_weights(self, update):
        self.events.append("apply")
        return self.receiver.apply(update)

    def stop(self):
        self.events.append("stop")

    def go(self):
        self.events.append("go")


@pytest.fixture
def crew(store):
    trainers, generators = [Trainer(store, 0), Trainer(store, 1)], [Generator(store), Generator(store)]
    return trainers, generators


def test_sync_weights(crew):
    trainers, generators = crew
    report = sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    assert report.version == 1 and len(report.receipts) == 2
    assert report.size_bytes == trainers[0].publisher.latest.size_bytes
    assert 0 < report.pause_s <= report.total_s
    for generator in generators:
        assert generator.events == ["stop", "apply", "go"]
        assert_same(generator.model.tensors, weights(0))


def test_sync_resumes_after_a_failure_and_can_be_repeated(crew, store):
    trainers, generators = crew
    broken = generators[1].receiver
    load, broken._load = broken._load, lambda tensors: 1 / 0
    with pytest.raises(WeightUpdateError, match="ZeroDivisionError") as caught:
        sync_weights(LocalPeers(trainers), LocalPeers(generators), resume="go")
    assert "did not reach every generator" in caught.value.__notes__[-1]
    assert [g.events[-1] for g in generators] == ["go", "go"]
    assert [g.receiver.version for g in generators] == [1, None]
    broken._load = load
    report = sync_weights(LocalPeers(trainers[:1]), LocalPeers(generators), publish="latest")
    assert report.version == 1
    assert [r.size_bytes > 0 for r in report.receipts] == [False, True]


def test_sync_refuses_none_or_several_publishers(crew, store):
    trainers, generators = crew
    with pytest.raises(WeightUpdateError, match="exactly one rank; got 0 updates"):
        sync_weights(LocalPeers(trainers[1:]), LocalPeers(generators))
    with pytest.raises(WeightUpdateError, match="exactly one rank; got 2 updates"):
        sync_weights(LocalPeers([Trainer(store, 0), Trainer(store, 0)]), LocalPeers(generators))


def test_sync_refuses_generators_that_report_another_version(crew):
    trainers, generators = crew
    early = trainers[0].publish_weights()
    receipt = generators[0].receiver.apply(early)
    generators[0].apply_weights = lambda update: receipt
    with pytest.raises(WeightUpdateError, match=r"other versions than 2: \{0: 1\}"):
        sync_weights(LocalPeers(trainers), LocalPeers(generators))
