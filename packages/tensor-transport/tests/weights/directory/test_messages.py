"""What is said to a directory: few messages one after another, and each of them once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from models import assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, sync

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.versions import Begin, Finish


class Overheard(_LocalEdge):
    """Notes what is said through it; what is not waited for in brackets."""

    def __init__(self, record, said):
        super().__init__(record)
        self.said, self._own = said, threading.local()

    def ask(self, method, args, timeout_s):
        if not getattr(self._own, "within", False):
            self.said.append(method)
        return super().ask(method, args, timeout_s)

    def tell(self, method, args):
        self.said.append(f"({method})")
        self._within(super().tell, method, args)

    def poll(self, method, args, wait_s, said=None):
        self.said.append(f"{said[0]} + {method}" if said else method)
        return self._within(super().poll, method, args, wait_s, said)

    def _within(self, act, *args):
        self._own.within = True
        try:
            return act(*args)
        finally:
            self._own.within = False


def test_an_update_of_one_bucket_takes_few_messages_one_after_another():
    store, record = InProcessByteStore(), Record(1, 60.0, "auto")
    store.release_scope = ""  # As Ray's: nobody has to release anything.
    from_trainer, from_generator = [], []
    plain = WeightDirectory(_LocalEdge(record))
    lock = plain._edge._changed
    directories = [WeightDirectory(Overheard(record, said)) for said in (from_trainer, from_generator)]
    for directory in directories:
        directory._edge._changed = lock
    trainer, generator = Trainer(store, directories[0]), Generator(store, directories[1])
    trainer.publisher = WeightPublisher(store, directory=directories[0])
    sync([trainer], [generator], plain, publish="publish_mapping")
    del from_trainer[:], from_generator[:]
    sync([trainer], [generator], plain, publish="publish_mapping")
    assert_same(generator.model.tensors, weights(0))
    assert from_trainer == ["begin", "finish"]
    assert [m for m in from_generator if m != "news"] == ["offer", "(took)", "vote + decision"]


@pytest.mark.hostile
def test_a_vote_that_waits_for_the_decision_counts_once():
    """A receiver that is made again takes it back, though its process before still waits."""
    voted = threading.Event()

    class Heard(Record):
        def vote(self, *args):
            super().vote(*args)
            voted.set()

    record = Heard(lease_s=1e9)
    edge = _LocalEdge(record)
    edge.ask("enroll", (0, "publisher", ""), TIMEOUT_S)
    number = edge.ask("reserve", (["ballot"], None), TIMEOUT_S)
    edge.ask("begin", (Begin(0, 1, "publisher", "", None, "", None, None),), TIMEOUT_S)
    offer = (number, frozenset(), "generator", "ballot")
    vote = ("vote", (number, "generator", True, ""))
    edge.ask("offer", offer, TIMEOUT_S)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(edge.poll, "decision", (number,), TIMEOUT_S, vote)
        assert voted.wait(TIMEOUT_S)
        edge.ask("offer", offer, TIMEOUT_S)
        edge.ask("finish", (number, Finish(0, "publisher", 0, None, 0.0, 0.0, ())), TIMEOUT_S)
        assert record.versions[number].state == "complete", "nobody that lives has loaded it"
        edge.ask(*vote, TIMEOUT_S)
        assert waiting.result(TIMEOUT_S) == "committed"
