"""Updates over one transport that is chosen for all: groups of our own, and what is kept beside them."""

import pytest
import streaming
from models import assert_same, weights
from streaming import TIMEOUT_S, sync

from raycrew.tensor_transport import (
    NoTransportError,
    RouteStore,
    TransportError,
    UpdateAbortedError,
    WeightDirectory,
    WeightRoute,
    WeightUpdateError,
    sync_weights,
)
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.transports import SharedMemoryTransport


class Unread(SharedMemoryTransport):
    """What is kept in it can be read by nobody."""

    def map(self, offer, *, timeout_s=None):
        raise AssertionError("a bucket that was broadcast was read from where it is kept")


class Trainer(streaming.Trainer):
    def __init__(self, store, directory, part):
        super().__init__(store, directory, part, 2)
        self.store = store

    def join_route(self, told):
        return self.store.join(told)


class Generator(streaming.Generator):
    def __init__(self, store, directory):
        super().__init__(store, directory, rollback="shadow")
        self.store = store

    def join_route(self, told):
        return self.store.join(told)


class Crew:
    """Two publishers, and two generators, each with a store of its own."""

    def __init__(self, directory, transport, reads_from):
        self.directory = directory
        self.route = WeightRoute(transport, timeout_s=TIMEOUT_S)
        self.stores, self.memories = [], []
        self.trainers = [Trainer(self.store(SharedMemoryTransport), directory, part) for part in range(2)]
        self.generators = [self.generator(reads_from) for _ in range(2)]

    def generator(self, reads_from=SharedMemoryTransport):
        return Generator(self.store(reads_from), self.directory)

    def store(self, kind):
        self.memories.append(kind(arena_bytes=1 << 16))
        self.stores.append(RouteStore({"shared_memory": self.memories[-1]}))
        return self.stores[-1]

    def sync(self, seed, **options):
        for trainer in self.trainers:
            trainer.seed = seed
        options = {"route": self.route, "prepare": "prepare_weights"} | options
        return sync(self.trainers, self.generators, self.directory, **options)

    def all_hold(self, seed):
        for generator in self.generators:
            assert_same(generator.model.tensors, weights(seed))
            assert generator.events.count("stop") == generator.events.count("go")

    def close(self):
        for each in (self.route, *self.stores, *self.memories):
            each.close()


@pytest.fixture
def crew(request):
    asked = getattr(request, "param", ("gloo", Unread))
    with WeightDirectory.local(keep=2) as directory:
        crew = Crew(directory, *asked)
        yield crew
        crew.close()


def test_a_group_over_trainer_and_generators_broadcasts_what_each_publishes(crew):
    assert crew.sync(1).version == 1
    crew.all_hold(1)
    keys = {store.key for store in crew.stores}
    assert len(keys) == 1 and keys != {""}
    assert {store.explain() for store in crew.stores} == {crew.route.explain()}
    assert crew.route.choice.name == "gloo"
    assert crew.route.explain().startswith("broadcast of cpu bytes, 4 members on 1 machine: gloo")

    assert crew.sync(2, prepare=None).version == 2
    crew.all_hold(2)
    assert {store.key for store in crew.stores} == keys, "a group that works stays"

    late = crew.generator()
    assert late.receiver.pull().version == 2
    assert_same(late.model.tensors, weights(2))
    crew.generators.append(late)
    assert crew.sync(3).version == 3
    crew.all_hold(3)
    assert {store.key for store in crew.stores}.isdisjoint(keys), "who comes late is in the next group"


@pytest.mark.hostile
def test_after_any_failure_all_serve_the_old_version_and_the_next_update_has_a_group_again(crew):
    crew.sync(1)
    failing = crew.generators[1]
    failing.before_load = lambda: 1 / 0
    with pytest.raises(WeightUpdateError, match="ZeroDivisionError"):
        crew.sync(2, prepare=None)
    crew.all_hold(1)
    failing.before_load = lambda: None

    crew.trainers[1].before_each = lambda name: 1 / 0
    with pytest.raises(ZeroDivisionError):
        crew.sync(2)
    crew.all_hold(1)
    crew.trainers[1].before_each = lambda name: None

    crew.stores[-1].abandon()  # As by a process that dies between the start of an update and its first byte.
    assert crew.sync(2).version > 1
    crew.all_hold(2)


@pytest.mark.hostile
def test_nobody_reads_alone_what_others_wait_for_him_to_take(crew):
    crew.sync(1)
    leaving = crew.generators[1]
    prepare = leaving.receiver.prepare

    def leave_and_prepare(version, **options):
        leaving.store.abandon()
        return prepare(version, **options)

    leaving.receiver.prepare = leave_and_prepare
    with pytest.raises(TransportError, match=r"takes no part any more|left|given up"):
        crew.sync(2)
    crew.all_hold(1)


@pytest.mark.parametrize("crew", [("auto", SharedMemoryTransport)], indirect=True)
def test_on_one_machine_shared_memory_is_chosen_for_all(crew):
    assert crew.sync(1).version == 1
    crew.all_hold(1)
    assert crew.route.choice.name == "shared_memory"
    late = crew.generator()
    assert late.receiver.pull().version == 1


def test_versions_that_nobody_waits_for_are_kept_and_not_broadcast(crew):
    crew.sync(1)
    for trainer in crew.trainers:
        trainer.seed = 2
        trainer.publisher.publish(trainer.mine(), version=2)
    late = crew.generator()
    assert late.receiver.pull().version == 2
    assert_same(late.model.tensors, weights(2))


def test_a_route_that_not_all_can_use_is_refused_before_anything_begins(crew):
    with pytest.raises(NoTransportError, match="not connected to a Ray cluster"):
        crew.sync(1, route=WeightRoute("object_store"))
    with pytest.raises(ValueError, match="route= is for versions that stream"):
        sync_weights(LocalPeers(crew.trainers), LocalPeers(crew.generators), route=crew.route)
    for generator in crew.generators:
        generator.join_route = lambda told: "here"
    with pytest.raises(TransportError, match=r"what RouteStore.join\(\) returns"):
        crew.sync(1)
    assert crew.directory.latest is None


def test_a_publisher_that_was_not_told_of_the_route_gives_the_update_up(crew):
    crew.sync(1)
    crew.trainers[1].publish_weights = lambda: (
        crew.trainers[1].store.abandon(),
        streaming.Trainer.publish_weights(crew.trainers[1]),
    )[1]
    with pytest.raises(TransportError, match="has not joined the route") as caught:
        crew.sync(2)
    assert not isinstance(caught.value, UpdateAbortedError)
    crew.all_hold(1)
