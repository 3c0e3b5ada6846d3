"""Which samples are handed out, to whom and when: random uses against a plain account of them."""

from collections import Counter
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycrew.worker_groups.errors import SampleLeaseError
from raycrew.worker_groups.rollouts.samples._asking.codec import decode
from raycrew.worker_groups.rollouts.samples._asking.requests import adding, getting, going_on, putting
from raycrew.worker_groups.rollouts.samples._keeping.keeper import Keeper
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._states import VersionRun, order_of
from raycrew.worker_groups.rollouts.samples._states.order import _mixed
from raycrew.worker_groups.rollouts.samples._states.ready import Ready
from raycrew.worker_groups.rollouts.samples._states.sample import is_ready
from raycrew.worker_groups.rollouts.samples._states.versions import extended, oldest, per_token
from raycrew.worker_groups.rollouts.samples._storage import durable, journal

DEFAULTS = {
    "columns": ("tokens", "reward", "advantage"),
    "name": "q",
    "stale": "keep",
    "rescored": (),
    "shuffle_seed": None,
    "shuffle_window": 4,
    "max_samples": None,
    "max_memory": None,
    "max_keys": None,
    "spill": False,
    "directory": None,
    "fsync": False,
    "lease_s": 10.0,
}


class World:
    """A keeper with a clock of its own, random users, and what they know."""

    def __init__(self, **options):
        self.now = 0.0
        self.options = QueueOptions(**{**DEFAULTS, **options})
        self.keeper = Keeper(self.options, lambda: self.now, lambda tally: None)
        self.version = 0
        self.oldest = {}  # by sample: its oldest version
        self.tokens = {}
        self.scored = {}  # by sample: the version that has scored it
        self.leases = []  # lease, ids, until, use
        self.done = Counter()
        self.puts = []  # what was asked, and the numbers of the samples

    def reopen(self):
        self.keeper.close()
        self.keeper = Keeper(self.options, lambda: self.now, lambda tally: None)
        self.leases = [(name, ids, self.now, *rest) for name, ids, _, *rest in self.leases]
        assert self.keeper.stats().version == self.version

    def ask(self, request):
        return getattr(self.keeper, request.operation)(**request.arguments)

    def living(self):
        return [lease for lease in self.leases if lease[2] > self.now]

    def put(self, n, lag, partial):
        version = max(0, self.version - lag)
        rows = {"tokens": [f"{self.version} {i}" for i in range(n)]}
        keys = [f"key {len(self.puts)} {i}" for i in range(n)]
        request = putting(self.options, rows, version, [4] * n, partial=partial, keys=keys)
        ids = self.ask(request)
        self.puts.append((request, ids))
        assert not set(ids) & self.oldest.keys()
        self.oldest |= dict.fromkeys(ids, version)
        self.tokens |= dict(zip(ids, rows["tokens"], strict=True))

    def put_again(self, which):
        if self.puts:
            request, ids = self.puts[which % len(self.puts)]
            assert self.ask(request) == ids, "what was put is not put again"

    def get(self, n, staleness, use):
        wanted = {"learn": {}, "go on": {"is_to_go_on": True}}.get(use, {"adds": [use]})
        request = getting(self.options, n, at_least=1, max_staleness=staleness, **wanted)
        handed = self.ask(request)
        if handed is None:
            return
        in_hands = {
            i
            for _, ids, _, other in self.living()
            if use in ("learn", other) or other == "learn"
            for i in ids
        }
        assert not in_hands & set(handed.ids), "nobody gets what somebody has"
        for i, behind in zip(handed.ids, handed.behind, strict=True):
            counts_from = max(self.oldest[i], self.scored.get(i, 0))
            assert behind == self.version - counts_from
            assert staleness is None or behind <= staleness, "nothing older than that is handed out"
        assert not self.done.keys() & set(handed.ids), "what is done never comes again"
        assert decode(handed.rows["tokens"]) == [self.tokens[i] for i in handed.ids]
        lease = request.arguments["wanted"].lease
        self.leases.append((lease, handed.ids, self.now + 10.0, use))

    def settle(self, which, how, lag):
        if not self.leases:
            return
        lease, ids, until, use = entry = self.leases.pop(which % len(self.leases))
        version = max(0, self.version - lag)
        try:
            if how == "die":
                self.leases.append(entry)
                return
            if how == "renew":
                self.keeper.renew(lease, 12.0)
                self.leases.append((lease, ids, self.now + 12.0, use))
            elif how == "give back":
                self.keeper.give_back(lease, None)
            elif use in self.options.columns:
                held = self.keeper._ledger.samples
                anew = [i for i in ids if i in held and held[i].is_rescored]
                rows = {use: [1.0] * len(ids)}
                refused = self.ask(adding(self.options, ids, rows, version, lease))
                self.scored |= {i: version for i in anew if i not in refused and use == "reward"}
            elif use == "go on":
                rows = {"tokens": [f"more {i}" for i in ids]}
                self.ask(going_on(self.options, ids, rows, version, [8] * len(ids), lease, partial=False))
                self.tokens |= dict(zip(ids, rows["tokens"], strict=True))
                self.oldest |= {i: min(self.oldest[i], version) for i in ids}
            else:
                self.keeper.done(lease, None)
                self.done.update(ids)
        except SampleLeaseError:
            assert until <= self.now
        else:
            assert until > self.now

    def check(self):
        held = self.keeper._ledger.samples
        stats = self.keeper.stats()
        assert stats.produced == len(self.oldest) == stats.held + stats.consumed + stats.dropped
        assert stats.consumed == self.done.total() == len(self.done)
        assert stats.leased == sum(len(ids) for _, ids, *_ in self.living())
        for use, (_, ready) in self.keeper._ledger._ready.items():
            for floor in range(self.version + 1):
                there = [s.id for s in held.values() if is_ready(s, use) and s.tag >= floor]
                assert ready.count(floor) == len(there), (use, floor)


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 4), st.integers(0, 2), st.booleans()),
    st.tuples(
        st.just("get"),
        st.integers(1, 5),
        st.one_of(st.none(), st.integers(0, 2)),
        st.sampled_from(["learn", "reward", "advantage", "go on"]),
    ),
    st.tuples(
        st.just("settle"),
        st.integers(0, 9),
        st.sampled_from(["well", "well", "give back", "renew", "die"]),
        st.integers(0, 1),
    ),
    st.tuples(st.just("put_again"), st.integers(0, 9)),
    st.tuples(st.just("advance")),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("wait"), st.floats(0.5, 13.0)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(OPERATIONS, max_size=40),
    st.sampled_from(["keep", "drop", "rescore"]),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_random_producers_consumers_and_deaths(operations, stale, seed):
    rescored = ["reward"] if stale == "rescore" else []
    world = World(stale=stale, rescored=rescored, shuffle_seed=seed)
    run(world, [operation for operation in operations if operation != ("reopen",)])


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.sampled_from(["keep", "drop", "rescore"]), st.booleans())
def test_random_ends_of_the_process_that_writes_all_down(operations, stale, is_memory_full):
    rescored = ["reward"] if stale == "rescore" else []
    memory = 1 if is_memory_full else None
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(journal, "SEGMENT_BYTES", 600),
        mock.patch.object(durable, "_SLACK_BYTES", 600),
    ):
        world = World(stale=stale, rescored=rescored, directory=folder, max_memory=memory)
        run(world, [*operations, ("reopen",)])
        world.keeper.close()


def run(world, operations):
    for name, *arguments in operations:
        if name == "advance":
            world.version += 1
            world.keeper.advance(world.version)
        elif name == "wait":
            world.now += arguments[0]
        else:
            getattr(world, name)(*arguments)
        world.check()


def test_keys_of_samples_that_went_another_way_are_forgotten():
    there = {}
    ready = Ready(lambda tag, key: there.get(key) == tag)
    for key in range(20_000):
        there[key] = key % 3
        ready.push(key % 3, key)
        if key >= 10:
            ready.leave(there.pop(key - 10))
    assert ready.count(0) == 10 and sum(map(len, ready._heaps.values())) < 2000
    assert ready.pop(20, 1) == [key for key in range(19_990, 20_000) if key % 3 >= 1]


def test_a_key_that_was_pushed_twice_comes_once():
    there = {5: 0, 7: 0}
    ready = Ready(lambda tag, key: there.get(key) == tag)
    for key in (7, 5):
        ready.push(0, key)
    ready.leave(0)
    ready.push(0, 5)
    assert ready.pop(9, 0) == [5, 7]


@pytest.mark.parametrize("window", [2, 5, 100])
def test_a_shuffled_order_follows_from_seed_and_number_alone_and_stays_in_its_window(window):
    order = order_of(7, window)
    keys = [order.key(i) for i in range(300)]
    assert [order.sample(key) for key in keys] == list(range(300))
    shuffled = [order.sample(key) for key in sorted(keys)]
    assert shuffled != list(range(300)) and [i // window for i in shuffled] == [
        i // window for i in range(300)
    ]
    assert shuffled == sorted(range(300), key=order_of(7, window).key)
    assert shuffled != sorted(range(300), key=order_of(8, window).key)


def test_a_seed_gives_the_order_that_it_gave_in_earlier_versions():
    """A queue in a folder may be opened by a later one."""
    given = {
        0: [1, 4, 5, 11, 7, 6, 9, 0, 10, 3, 2, 8],
        7: [7, 8, 1, 2, 3, 10, 9, 5, 4, 0, 11, 6],
        -1: [4, 3, 7, 5, 8, 2, 0, 1, 9, 10, 6, 11],
    }
    assert {seed: sorted(range(12), key=order_of(seed, 12).key) for seed in given} == given


def test_what_is_random_is_as_published_for_splitmix64():
    assert [_mixed(0), _mixed(1234567)] == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_the_runs_of_a_rollout():
    runs = extended((VersionRun(3, 4),), 5, 7)
    assert runs == ((3, 4), (5, 3)) and per_token(runs) == [3, 3, 3, 3, 5, 5, 5]
    assert extended(runs, 5, 9) == ((3, 4), (5, 5)) and extended(runs, 6, 7) == runs
    assert extended((VersionRun(3, 0),), 5, 2) == ((5, 2),) and extended((VersionRun(3, 0),), 5, 0) == (
        (3, 0),
    )
    assert [oldest(each) for each in (runs, (VersionRun(1, 0), VersionRun(3, 4)), (VersionRun(2, 0),))] == [
        3,
        3,
        2,
    ]
    with pytest.raises(ValueError, match="had 7 tokens before, and has 6 now"):
        extended(runs, 6, 6)
    with pytest.raises(ValueError, match="needs `lengths`"):
        extended((VersionRun(3, None),), 6, 6)
