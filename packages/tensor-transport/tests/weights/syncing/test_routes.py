"""Updates over one transport that is chosen for all: groups of our own, and what is kept beside them."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import streaming
import torch
from forking import in_a_child
from models import assert_same, weights
from streaming import TIMEOUT_S, sync

from raycrew.tensor_transport import (
    BucketFetchError,
    NoTransportError,
    RouteStore,
    StaleVersionError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UpdateAbortedError,
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    WeightRoute,
    WeightUpdateError,
    _ray,
    sync_weights,
)
from raycrew.tensor_transport.process_groups import CollectiveGroup
from raycrew.tensor_transport.testing import LocalPeers, LocalResults
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights._routing import Route
from raycrew.tensor_transport.weights._routing import store as store_module
from raycrew.tensor_transport.weights._syncing.session import members_of
from raycrew.tensor_transport.weights._syncing.synchronisation import Synchronisation


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

    @property
    def keys(self):
        return {store.key for store in self.stores}

    def on_published(self):
        """An event that is set once the last trainer has published."""
        published, last = threading.Event(), self.trainers[-1]

        def publish():
            update = type(last).publish_weights(last)
            published.set()
            return update

        last.publish_weights = publish
        return published

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
    keys = crew.keys
    assert len(keys) == 1 and keys != {""}
    assert {store.explain() for store in crew.stores} == {crew.route.explain()}
    assert crew.route.choice.name == "gloo"
    assert crew.route.explain().startswith("broadcast of cpu bytes, 4 members on 1 machine: gloo")
    (kept_in,) = {store._route.kept_in for store in crew.stores}
    kept = f"kept for those who come late: pull of cpu bytes, 4 members on 1 machine: {kept_in}"
    assert kept in crew.route.explain()

    assert crew.sync(2, prepare=None).version == 2
    crew.all_hold(2)
    assert crew.keys == keys, "a group that works stays"

    late = crew.generator()
    assert late.receiver.pull().version == 2
    assert_same(late.model.tensors, weights(2))
    crew.generators.append(late)
    assert crew.sync(3).version == 3
    crew.all_hold(3)
    assert crew.keys.isdisjoint(keys), "who comes late is in the next group"


@pytest.mark.hostile
def test_updates_over_one_route_take_turns(crew):
    for trainer in crew.trainers:
        trainer.seed = 1
    together = threading.Barrier(3)

    def several(_):
        together.wait(TIMEOUT_S)
        options = {"route": crew.route, "prepare": "prepare_weights"}
        return [sync(crew.trainers, crew.generators, crew.directory, **options).version for _ in range(2)]

    with ThreadPoolExecutor(3) as threads:
        versions = [version for found in threads.map(several, range(3)) for version in found]
    assert sorted(versions) == [1, 2, 3, 4, 5, 6]
    crew.all_hold(1)


@pytest.mark.hostile
def test_an_update_that_gets_no_turn_in_time_says_so_and_disturbs_nobody(crew):
    inside, go_on, last = threading.Event(), threading.Event(), crew.generators[-1]

    def prepare(told):
        inside.set()
        assert go_on.wait(TIMEOUT_S)
        return type(last).prepare_weights(last, told)

    last.prepare_weights = prepare
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(crew.sync, 1)
        assert inside.wait(TIMEOUT_S)
        with pytest.raises(TransportTimeoutError, match="another update goes over this route"):
            crew.sync(1, timeout_s=0.1)
        go_on.set()
        assert first.result(TIMEOUT_S).version == 1
    del last.prepare_weights
    crew.all_hold(1)
    assert crew.sync(2).version == 2


@pytest.mark.hostile
def test_an_update_that_is_cancelled_before_its_turn_leaves_the_groups_as_they_are(crew):
    crew.sync(1)
    keys, last, inside, go_on = crew.keys, crew.generators[-1], threading.Event(), threading.Event()
    options = {"route": crew.route, "directory": crew.directory, "timeout_s": None}
    waiting = Synchronisation(
        LocalPeers(crew.trainers), LocalPeers(crew.generators), *_named(sync_weights, options)
    )

    def prepare(told):
        inside.set()
        assert go_on.wait(TIMEOUT_S)
        return type(last).prepare_weights(last, told)

    last.prepare_weights = prepare
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(crew.sync, 1)
        assert inside.wait(TIMEOUT_S)
        second = threads.submit(waiting.run)
        waiting.give_up("nobody wants it")
        try:
            with pytest.raises(UpdateAbortedError, match="given up before it began: nobody wants it"):
                second.result(TIMEOUT_S)
        finally:
            go_on.set()
        assert first.result(TIMEOUT_S).version == 2
    del last.prepare_weights
    assert crew.sync(3).version == 3
    assert crew.keys == keys


def _named(function, options):
    """The values of a function's options, in the order in which it takes them."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    return [options.get(parameter.name, parameter.default) for parameter in parameters]


@pytest.mark.hostile
@pytest.mark.parametrize("phase", ["apply", "publish"])  # the trainer is waited for in another thread
def test_an_update_within_another_one_over_its_route_is_refused_and_the_wait_is_drawn(crew, phase):
    refused = []

    def again(step):
        if step.phase == phase and not refused:
            with pytest.raises(TransportError, match="over this route in this very thread, or waits for it"):
                crew.sync(2, timeout_s=5.0)
            refused.append(step)

    report = crew.sync(1, progress=again)
    assert refused
    assert next(span.phase for span in report.spans if span.rank == "generators") == "turn"
    crew.all_hold(1)


@pytest.mark.parametrize("timeout_s", [0, -1, -0.5, float("nan")])
def test_a_time_that_is_none_is_refused_before_anything_begins(crew, timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        crew.sync(1, timeout_s=timeout_s)
    assert crew.directory.latest is None


@pytest.mark.hostile
@pytest.mark.parametrize("timeout_s", [0, float("nan"), float("inf")])
def test_a_route_has_a_time_in_which_all_join(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be above 0 and finite"):
        WeightRoute(timeout_s=timeout_s)


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


class Supervised(LocalPeers):
    """A group that says early what became of a call."""

    def on(self, *, ranks):
        found = Supervised(())
        found._workers = super().on(ranks=ranks)._workers
        return found

    def call(self, method, /, *args, **kwargs):
        return Early(lambda: super(Supervised, self).call(method, *args, **kwargs))


class Early:
    def __init__(self, call):
        self.call = call

    def exception(self, *, timeout=None):
        try:
            self.results = self.call().get_results()
        except OSError as error:
            self.error = error
            return error
        return None

    def get_results(self, *, timeout=None):
        if not (hasattr(self, "error") or hasattr(self, "results")):
            self.exception()
        if hasattr(self, "error"):
            raise self.error
        return self.results


@pytest.mark.hostile
def test_whoever_does_not_join_is_named_and_the_others_do_not_wait_and_join_anew(crew):
    crew.sync(0)
    trainer, generators = (members_of([Supervised(all_)], None) for all_ in (crew.trainers, crew.generators))
    last, before = crew.generators[1], crew.keys

    def refuse(told):
        if told is not None:
            del last.join_route
            raise OSError("no socket is left")
        return last.store.join(told)

    last.join_route = refuse
    crew.route.forget()
    with pytest.raises(OSError, match="no socket is left") as failed:
        crew.route.connect(trainer, generators, TIMEOUT_S)
    assert failed.value.__notes__[0] == "generator 1 did not join the route of the update"
    assert all("is over" in note for note in failed.value.__notes__[1:])
    crew.sync(1)
    crew.all_hold(1)
    assert crew.keys.isdisjoint(before)


@pytest.mark.hostile
@pytest.mark.parametrize("prepare", ["prepare_weights", None])
def test_a_bucket_that_is_damaged_on_its_way_to_one_gives_the_update_up_for_all(crew, monkeypatch, prepare):
    crew.sync(1)
    receive, damaged = CollectiveGroup.receive, []

    def flipped(self, into, **options):
        transfer = receive(self, into, **options)
        if not damaged:
            damaged.append(into[0].numel())
            transfer.wait(TIMEOUT_S)
            into[0][-1] ^= 1
        return transfer

    monkeypatch.setattr(CollectiveGroup, "receive", flipped)
    with pytest.raises(WeightUpdateError, match="its checksum differs"):
        crew.sync(2, prepare=prepare)
    assert damaged[0] > 0
    crew.all_hold(1)
    assert crew.sync(3).version > 1
    crew.all_hold(3)


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


@pytest.mark.parametrize("crew", [("auto", SharedMemoryTransport)], indirect=True)
def test_buckets_whose_sizes_are_known_are_packed_where_they_are_kept(crew, monkeypatch):
    monkeypatch.setattr(RouteStore, "put_tensor", None)
    for seed in range(2):
        crew.sync(seed, publish="publish_mapping")
        crew.all_hold(seed)


def test_whether_all_are_on_the_route_is_asked_without_threads(crew, monkeypatch):
    crew.sync(1)
    ranks = [members_of([LocalPeers(each)], None) for each in (crew.trainers, crew.generators)]
    monkeypatch.setattr(threading.Thread, "start", None)
    assert {crew.route.connect(*ranks, TIMEOUT_S)} == crew.keys


def test_versions_that_nobody_waits_for_are_kept_and_not_broadcast(crew):
    crew.sync(1)
    for trainer in crew.trainers:
        trainer.seed = 2
        trainer.publisher.publish(trainer.mine(), version=2)
    late = crew.generator()
    assert late.receiver.pull().version == 2
    assert_same(late.model.tensors, weights(2))


def test_a_route_that_not_all_can_use_is_refused_before_anything_begins(crew, monkeypatch):
    for asked in ("is_connected", "nodes.is_connected"):  # tests before this one may have left a connection
        monkeypatch.setattr(f"raycrew.tensor_transport._ray.{asked}", lambda: False)
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


@pytest.fixture
def given(monkeypatch):
    """How long each bucket that was sent may take, and each answer of a rank."""
    given = {"send": set(), "answer": set()}
    send, answer = CollectiveGroup.send, LocalResults.get_results

    def sent(self, buffers, **options):
        given["send"].add(options["timeout_s"])
        return send(self, buffers, **options)

    def answered(self, *, timeout=None):
        given["answer"].add(timeout)
        return answer(self, timeout=timeout)

    monkeypatch.setattr(CollectiveGroup, "send", sent)
    monkeypatch.setattr(LocalResults, "get_results", answered)
    return given


def test_whoever_is_waited_for_has_as_long_as_the_update_however_long_it_may_take_to_join(crew, given):
    crew.sync(1, timeout_s=None)
    assert given == {"send": {None}, "answer": {None}}
    given["send"].clear(), given["answer"].clear()
    crew.sync(2, timeout_s=10 * TIMEOUT_S)
    assert all(timeout_s > 2 * TIMEOUT_S for found in given.values() for timeout_s in found)


@pytest.mark.hostile
def test_an_update_that_never_reached_its_receivers_does_not_spoil_the_next_one(crew):
    crew.sync(1)
    keys, published, stuck = crew.keys, crew.on_published(), crew.generators[0]

    def stop():
        assert published.wait(TIMEOUT_S)
        raise RuntimeError("the engine is stuck")

    stuck.stop = stop
    with pytest.raises(RuntimeError, match="the engine is stuck"):
        crew.sync(2, prepare=None)
    del stuck.stop
    assert crew.sync(3).version > 1
    for generator in crew.generators:
        assert_same(generator.model.tensors, weights(3))
    assert crew.keys.isdisjoint(keys)


@pytest.mark.hostile
def test_a_bucket_that_would_be_too_late_is_refused_and_does_not_count(crew):
    crew.sync(1)
    sender, receivers = crew.stores[0], crew.stores[2:]
    data = np.arange(9, dtype=np.uint8)
    assert sender.begin(sender.key, 0.0)
    with pytest.raises(TransportTimeoutError, match="the time of the update is over"):
        sender.put(data)
    assert sender.begin(sender.key, TIMEOUT_S)
    ticket = sender.put(data)
    for receiver in receivers:
        with pytest.raises(TransportTimeoutError, match="the time of the update is over"):
            receiver.get(ticket, 0.0)
    with ThreadPoolExecutor(len(receivers)) as pool:
        found = list(pool.map(lambda receiver: receiver.get(ticket, TIMEOUT_S), receivers))
    assert all(np.array_equal(each, data) for each in found)
    sender.release(ticket)


@pytest.mark.hostile
def test_what_fails_outside_of_an_update_leaves_the_route_whole(crew):
    crew.sync(1), crew.sync(2)
    keys = crew.keys
    with pytest.raises(StaleVersionError):
        crew.generators[0].receiver.apply(1)
    with pytest.raises(ZeroDivisionError):
        crew.trainers[0].publisher.publish((1 / 0 for _ in range(1)), version=7)
    assert crew.keys == keys
    assert crew.sync(3).version > 7
    crew.all_hold(3)
    assert crew.keys == keys


@pytest.mark.parametrize("crew", [("auto", SharedMemoryTransport)], indirect=True)
def test_all_of_a_version_may_be_put_before_any_of_it_is_fetched_unless_it_is_broadcast(crew):
    """As where one thread is both trainer and generator."""
    published = crew.on_published()
    parts = [{f"{part}.{i}": torch.full((128,), float(i)) for i in range(8)} for part in range(2)]
    for trainer in crew.trainers:
        trainer.mine = lambda part=trainer.part: parts[part]
    for generator in crew.generators:

        def prepare(version, generator=generator):
            assert published.wait(TIMEOUT_S)
            return type(generator).prepare_weights(generator, version)

        generator.prepare_weights = prepare
    crew.sync(1)
    for generator in crew.generators:
        assert_same(generator.model.tensors, parts[0] | parts[1])


def test_a_transport_of_a_name_that_no_bucket_is_ever_asked_for_under_is_refused():
    named = r"no transport 'shared-memory' .*tcp"
    with SharedMemoryTransport() as memory, pytest.raises(ValueError, match=named):
        RouteStore({"shared-memory": memory})


@pytest.mark.parametrize("transport", ["nixl", ["gloo", "nccl"], "process_vm", [], ""])
def test_routes_that_no_buckets_go_over_are_refused_at_once(transport):
    with pytest.raises(ValueError, match="transport must be 'auto', or of shared_memory, gloo, "):
        WeightRoute(transport)


@pytest.mark.hostile
def test_over_tcp_buckets_are_offered_where_other_nodes_reach_this_one(monkeypatch):
    monkeypatch.setattr(_ray, "node_address", lambda: "127.0.0.7")
    route = Route("key", "tcp", "tcp", "tcp: chosen")
    with RouteStore() as ours, RouteStore() as theirs:
        for store in (ours, theirs):
            store.join(route)
        ticket = ours.put(np.arange(100, dtype=np.uint8))
        assert ticket.kept.key.host == "127.0.0.7"
        assert (theirs.get(ticket) == np.arange(100)).all()


class Joined:
    """A place in a group that nobody else has."""

    def __init__(self):
        self.closed = False

    def available(self):
        return "it is closed" if self.closed else None

    def close(self):
        self.closed = True


@pytest.mark.hostile
def test_what_is_joined_while_a_store_is_closed_is_left_again(monkeypatch):
    group, store = Joined(), RouteStore()

    def join(invitation, timeout_s):
        store.close()
        return group

    monkeypatch.setattr(store_module, "join_group", join)
    with pytest.raises(TransportClosedError):
        store.join(Route("key", "gloo", "shared_memory", "", invitations=(None,)))
    assert group.closed and store.key == ""


@pytest.mark.hostile
def test_of_two_routes_that_are_joined_at_once_one_is_left_again(monkeypatch):
    groups, routes = (
        [Joined(), Joined()],
        [Route(key, "gloo", "shared_memory", "", invitations=(None,)) for key in ("first", "second")],
    )

    def join(invitation, timeout_s):
        if len(groups) == 2:
            later = groups.pop()
            store.join(routes[1])
            assert store.key == "second"
            return later
        return groups[0]

    monkeypatch.setattr(store_module, "join_group", join)
    with RouteStore() as store:
        first = groups[1]
        assert store.join(routes[0]).key == store.key == "first"
        assert groups[0].closed and not first.closed
    assert first.closed


@pytest.mark.hostile
def test_who_joins_hears_at_once_of_an_interrupt_of_whoever_waits(crew):
    heard, joined = [], threading.Barrier(len(crew.generators) + 1, timeout=TIMEOUT_S)
    stores = [generator.store for generator in crew.generators]

    def join(store, told):
        try:
            return store.join(told)
        except TransportError as error:
            heard.append(str(error))
            joined.wait()
            raise

    def interrupted(told):
        if told is not None:
            raise KeyboardInterrupt
        return crew.trainers[0].store.join(None)

    for generator, store in zip(crew.generators, stores, strict=True):
        generator.join_route = partial(join, store)
    crew.trainers[0].join_route = interrupted
    with pytest.raises(KeyboardInterrupt):
        crew.sync(1)
    joined.wait()
    assert all("whoever waited for them was interrupted" in text for text in heard), heard


@pytest.mark.parametrize(
    ("of_publisher", "of_receiver"),
    [
        (SharedMemoryTransport, RouteStore),
        (RouteStore, SharedMemoryTransport),
        (RouteStore, nullcontext),  # Ray's object store
    ],
)
def test_what_a_store_of_another_kind_has_put_is_refused_by_name(of_publisher, of_receiver):
    with (
        WeightDirectory.local() as directory,
        of_publisher() as ours,
        of_receiver() as theirs,
        WeightPublisher(ours, directory=directory) as publisher,
        WeightReceiver(dict, store=theirs, directory=directory) as receiver,
    ):
        publisher.publish({"w": torch.ones(3)})
        with pytest.raises(BucketFetchError, match="stores of one kind"):
            receiver.pull()


class Slow(SharedMemoryTransport):
    """One thread stands still where it is asked what it can, until it goes on."""

    def __init__(self):
        self.stands, self.goes_on = threading.Event(), threading.Event()
        super().__init__(arena_bytes=1 << 16)

    @property
    def capabilities(self):
        if threading.current_thread() is not threading.main_thread():
            self.stands.set()
            assert self.goes_on.wait(TIMEOUT_S)
        return super().capabilities


@pytest.mark.hostile
def test_a_forked_child_uses_a_store_whatever_its_parents_threads_did_with_it():
    found = np.arange(8, dtype=np.uint8)

    def used():
        ticket = store.put(found)
        return (store.get(ticket) == found).all() and not store.close()

    with Slow() as memory, RouteStore({"shared_memory": memory}) as store, ThreadPoolExecutor() as pool:
        putting = pool.submit(store.put, found)
        assert memory.stands.wait(TIMEOUT_S)
        try:
            assert in_a_child(used)
        finally:
            memory.goes_on.set()
        assert (store.get(putting.result(TIMEOUT_S)) == found).all()


@pytest.mark.hostile
def test_a_forked_child_is_on_no_route_of_its_parent_which_stays_on_it(crew):
    crew.sync(1)
    key, store = crew.generators[0].store.key, crew.generators[0].store
    assert in_a_child(lambda: store.key == "" and store.explain() == "no route is joined")
    assert in_a_child(lambda: not store.close())

    def refused():
        for ask in (partial(crew.route.connect, [], []), crew.route.turn, partial(crew.sync, 2)):
            with pytest.raises(
                TransportError, match=r"this WeightRoute is that of process .* make another one"
            ):
                ask()
        return not crew.route.close()

    assert in_a_child(refused)
    assert store.key == key
    assert crew.sync(2).version == 2
    crew.all_hold(2)
    assert crew.keys == {key}
