"""Publishers and transports do not wait for what makes something ready slowly: it is fetched meanwhile."""

import threading
from pathlib import Path

import pytest
import torch
from doubles import Generator, await_no_fetching
from models import assert_same, weights
from streaming import TIMEOUT_S, Trainer, sync

from raycrew.tensor_transport import RouteStore, WeightRoute
from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.transports import SharedMemoryTransport, TcpTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher

PREPARED = {"prepare": "prepare_weights"}


@pytest.fixture
def directory():
    with WeightDirectory.local(keep=2) as directory:
        yield directory
    await_no_fetching()


def raises(error):
    raise error


def told_when_published(trainer):
    """An event that is set when a trainer has put all of a version."""
    published, publish = threading.Event(), trainer.publish_weights
    trainer.publish_weights = lambda: (publish(), published.set())[0]
    return published


@pytest.mark.parametrize("borrow", [True, False])
@pytest.mark.parametrize("window_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_publisher_with_a_window_does_not_wait_for_who_stands_still(borrow, window_bytes, keep):
    with (
        WeightDirectory.local(keep=keep) as directory,
        SharedMemoryTransport("one") as store,
        SharedMemoryTransport("one") as there,
    ):
        trainer = Trainer(store, directory, window_bytes=window_bytes)
        generators = [Generator(there, directory, borrow=borrow, rollback="shadow") for _ in range(2)]
        all_put = threading.Event()

        def after(n):
            assert n or all_put.wait(TIMEOUT_S), "the publisher waits for who waits for it"

        for generator in generators:
            generator.after = after
        trainer.before_each = lambda name: all_put.set() if name == max(weights()) else None
        for trainer.seed in range(2):
            all_put.clear()
            sync([trainer], generators, directory, **PREPARED)
            for generator in generators:
                assert_same(generator.model.tensors, weights(trainer.seed))
                assert generator.did[-2:] == ["ahead", "exchange"]
        trainer.publisher.close()
    await_no_fetching()


def test_what_is_borrowed_stays_as_it_was_while_it_is_used(directory):
    """Two versions come and go while something is made ready of the one before."""
    with SharedMemoryTransport("one") as store, SharedMemoryTransport("one") as there:
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=512, timeout_s=TIMEOUT_S)
        generator = Generator(there, directory, borrow=True)

        def after(n):
            if not n:
                for seed in range(2, 6):
                    publisher.publish(weights(seed))

        generator.after = after
        publisher.publish(weights(1))
        generator.receiver.prepare(1)
        assert_same(generator.given, weights(1))
        with pytest.raises(WeightUpdateError, match="version 1 is not kept"):
            generator.receiver.apply(1)
        generator.after = lambda n: None
        generator.receiver.pull()
        assert_same(generator.model.tensors, weights(5))
        publisher.close()


@pytest.mark.hostile
def test_descriptors_and_mappings_are_given_back(directory):
    with SharedMemoryTransport("one") as store, SharedMemoryTransport("one") as there:
        trainer, generator = Trainer(store, directory), Generator(there, directory, borrow=True)
        sync([trainer], [generator], directory, **PREPARED)

        def open_files():
            await_no_fetching()
            maps = Path("/proc/self/maps").read_text()
            return sum(1 for _ in Path("/proc/self/fd").iterdir()), maps.count("/raycrew-")

        for _ in range(5):
            trainer.publish_weights()
            generator.receiver.pull()
        before = open_files()
        for _ in range(20):
            generator.after = lambda n: raises(RuntimeError("no room"))
            with pytest.raises(WeightUpdateError, match="no room"):
                sync([trainer], [generator], directory, **PREPARED)
            generator.after = lambda n: None
            sync([trainer], [generator], directory, **PREPARED)
        after = open_files()
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 4
        trainer.publisher.close()


@pytest.mark.hostile
def test_a_bucket_over_tcp_that_never_comes_is_given_up_in_time(directory):
    """The trainer's server is gone while something is made ready of the first bucket."""
    with TcpTransport() as store, TcpTransport() as there:
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=TIMEOUT_S)
        generator = Generator(there, directory)
        generator.after = lambda n: None if n else store.close()
        publisher.publish(iter([(f"w{i}", torch.full((1 << 20,), float(i))) for i in range(8)]))
        try:
            generator.receiver.prepare(1, timeout_s=20.0)
        except WeightUpdateError:
            assert generator.receiver.intact and generator.receiver.version is None
        else:
            assert len(generator.given) == 8, "it had all by then"


class Routed:
    def join_route(self, told):
        return self.store.join(told)


class RoutedTrainer(Routed, Trainer):
    def __init__(self, store, directory, part, parts):
        super().__init__(store, directory, part, parts)
        self.store = store


class RoutedGenerator(Routed, Generator):
    def __init__(self, store, directory, **options):
        super().__init__(store, directory, **options)
        self.store = store


class Crew:
    """Two trainers and two generators, each with a store of its own, over gloo."""

    def __init__(self, directory):
        self.directory, self.route = directory, WeightRoute("gloo", timeout_s=TIMEOUT_S)
        self.memories = [SharedMemoryTransport(arena_bytes=1 << 16) for _ in range(4)]
        self.stores = [RouteStore({"shared_memory": memory}) for memory in self.memories]
        self.trainers = [RoutedTrainer(self.stores[part], directory, part, 2) for part in range(2)]
        self.generators = [RoutedGenerator(store, directory, rollback="shadow") for store in self.stores[2:]]

    def sync(self, seed):
        for trainer in self.trainers:
            trainer.seed = seed
        return sync(self.trainers, self.generators, self.directory, route=self.route, **PREPARED)

    def all_hold(self, seed):
        for generator in self.generators:
            assert_same(generator.model.tensors, weights(seed))
            assert generator.receiver.intact

    def close(self):
        for each in (self.route, *self.stores, *self.memories):
            each.close()


@pytest.fixture
def crew(directory):
    crew = Crew(directory)
    yield crew
    crew.close()


def test_what_is_broadcast_comes_while_one_stands_still(crew):
    published = [told_when_published(trainer) for trainer in crew.trainers]
    crew.generators[0].after = lambda n: [event.wait(TIMEOUT_S) for event in published]
    for seed in range(2):
        for event in published:
            event.clear()
        crew.sync(seed)
        crew.all_hold(seed)
    for generator in crew.generators:
        assert generator.did == ["ahead", "exchange"] * 2


@pytest.mark.hostile
@pytest.mark.parametrize("nth", [0, 3])
def test_who_fails_while_it_is_broadcast_stops_all_and_the_next_one_works(crew, nth):
    crew.sync(0)
    crew.generators[1].after = lambda n: raises(RuntimeError("no room")) if n == nth else None
    with pytest.raises(Exception, match="no room"):
        crew.sync(1)
    crew.all_hold(0)
    crew.generators[1].after = lambda n: None
    crew.sync(2)
    crew.all_hold(2)


def test_streams_of_many_updates(directory):
    store = InProcessByteStore()
    trainers = [Trainer(store, directory, part, 2) for part in range(2)]
    generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
    for seed in range(30):
        for trainer in trainers:
            trainer.seed = seed
        sync(trainers, generators, directory, **PREPARED)
        for generator in generators:
            assert_same(generator.model.tensors, weights(seed))
    assert generators[0].did == ["ahead", "exchange"] * 30
