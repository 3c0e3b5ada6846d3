"""A directory that stands still longer than it is waited for, and then does what it was asked meanwhile."""

import contextlib
import itertools
import threading

import pytest
from models import Model, assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, sync

from raycrew.tensor_transport.errors import DirectoryLostError, UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory import Record
from raycrew.tensor_transport.weights._directory import directory as directories
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge

pytestmark = pytest.mark.hostile


class Still(_LocalEdge):
    """Stands still from one of its messages on: it has answered that one, or did not read it yet."""

    def __init__(self, keep):
        super().__init__(Record(keep, TIMEOUT_S, "auto"))
        self._own, self._entry, self._unread = threading.local(), threading.Lock(), []
        self.count, self.last, self.is_read, self.is_still = 0, -1, False, False

    def ask(self, method, args, timeout_s):
        act = super().ask
        return self._say(lambda: act(method, args, timeout_s))

    def tell(self, method, args):
        act = super().tell
        with contextlib.suppress(DirectoryLostError):
            self._say(lambda: act(method, args))

    def poll(self, method, args, wait_s, said=None):
        act, ask = super().poll, super().ask

        def late():
            for message in ([] if said is None else [said]) + [(method, args)]:
                ask(*message, wait_s)

        return self._say(lambda: act(method, args, wait_s, said), late)

    def _say(self, act, late=None):
        if getattr(self._own, "is_within", False):
            return act()
        with self._entry:
            self.count += 1
            is_last = self.count == self.last
            self.is_still |= is_last and not self.is_read
            if self.is_still:
                self._unread.append(late or act)
                raise DirectoryLostError("it does not answer")
        found = self._within(act)
        with self._entry:
            self.is_still |= is_last
            if self.is_still:
                raise DirectoryLostError("its answer does not come")
        return found

    def _within(self, act):
        self._own.is_within = True
        try:
            return act()
        finally:
            self._own.is_within = False

    def go_on(self):
        with self._entry:
            for each in self._unread:
                with contextlib.suppress(Exception):  # nobody waits for its answer
                    self._within(each)
            self._unread, self.last, self.is_still = [], -1, False


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
@pytest.mark.parametrize(
    ("publish", "bucket_bytes"),
    [("publish_mapping", 1 << 20), ("publish_mapping", 512), ("publish_weights", 512)],
)
def test_what_it_says_is_held_is_held_whenever_it_stands_still(
    monkeypatch, publish, bucket_bytes, prepare, is_read
):
    monkeypatch.setattr(directories, "_POLL_S", 0.2)  # So long those wait that asked before.
    for message in itertools.count(1):
        store, edge = InProcessByteStore(), Still(keep=2)
        directory = WeightDirectory(edge)
        trainer = Trainer(store, directory)
        trainer.publisher = WeightPublisher(store, directory=directory, bucket_bytes=bucket_bytes)
        generators = {
            name: Generator(store, directory, rollback="shadow", name=name) for name in ("first", "second")
        }

        def update(seed, trainer=trainer, generators=generators, directory=directory):
            trainer.seed = seed
            return sync([trainer], [*generators.values()], directory, publish=publish, prepare=prepare)

        update(1)
        edge.last, edge.is_read = edge.count + message, is_read
        with contextlib.suppress(DirectoryLostError, UpdateAbortedError):
            update(2)
        if not edge.is_still:
            break
        edge.go_on()
        holders = {name: s.version for s in directory.status() for name in s.holders}
        for name, generator in generators.items():
            receiver = generator.receiver
            assert receiver.intact and holders.get(name, receiver.version) == receiver.version
            assert_same(generator.model.tensors, weights(1 if receiver.version == 1 else 2))
        late = Model()
        WeightReceiver(late.load, store=store, directory=directory).pull(timeout_s=TIMEOUT_S)
        assert_same(late.tensors, weights(1 if directory.latest == 1 else 2))
        with contextlib.suppress(UpdateAbortedError):  # Once: that of a driver that nobody heard of.
            update(3)
        update(4)
        for generator in generators.values():
            assert_same(generator.model.tensors, weights(4))
        trainer.publisher.close()
        for generator in generators.values():
            generator.receiver.close()
        assert not store.held
    assert message > 1, "it never stood still"


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 512])
def test_what_it_has_when_it_goes_on_can_be_fetched(bucket_bytes, streamed, is_read):
    """Its publisher hears no answer, and has nobody to ask whether the version counts."""
    for message in itertools.count(1):
        store, edge = InProcessByteStore(), Still(keep=1)
        directory = WeightDirectory(edge)
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=bucket_bytes)

        def publish(seed, publisher=publisher):
            held = weights(seed)
            return publisher.publish(iter(held.items()) if streamed else held)

        publish(1)
        edge.last, edge.is_read = edge.count + message, is_read
        with contextlib.suppress(DirectoryLostError):
            publish(2)
        if not edge.is_still:
            break
        with pytest.raises(DirectoryLostError):
            publish(3)
        edge.go_on()
        late = Model()
        receiver = WeightReceiver(late.load, store=store, directory=directory)
        receiver.pull(timeout_s=TIMEOUT_S)
        assert_same(late.tensors, weights(1 if directory.latest == 1 else 2))
        for seed in (4, 5):
            update = publish(seed)
            receiver.pull(timeout_s=TIMEOUT_S)
            assert_same(late.tensors, weights(seed))
        assert len(store.held) <= 3 * len(update.buckets), "what it missed is told again, after a lease"
        receiver.close()
        publisher.close()
