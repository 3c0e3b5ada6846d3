from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycrew.worker_groups.balancing import WorkerLoad, strategy_of
from raycrew.worker_groups.balancing._strategies import key_bytes

KEYS = st.recursive(st.text() | st.binary() | st.integers(), lambda k: st.tuples(k, k))


def loads_of(*outstanding, usage=None):
    return [WorkerLoad(i, n, usage and usage[i]) for i, n in enumerate(outstanding)]


def test_round_robin_takes_turns_and_skips_those_who_are_not_offered():
    strategy = strategy_of("round_robin")
    loads = loads_of(0, 0, 0)
    assert [strategy.choose(loads, None) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [strategy.choose(loads[:2], None) for _ in range(2)] == [0, 1]


def test_least_outstanding_takes_turns_among_equals():
    strategy = strategy_of("least_outstanding")
    assert strategy.choose(loads_of(2, 1, 3), None) == 1
    assert [strategy.choose(loads_of(0, 0, 5), None) for _ in range(4)] == [0, 1, 0, 1]


def test_least_loaded_goes_by_reports_and_does_not_send_everything_to_one_between_two():
    strategy = strategy_of("least_loaded")
    assert strategy.choose(loads_of(0, 9, 0, usage=[0.9, 0.2, 0.8]), None) == 1
    sent = Counter()
    for _ in range(30):
        loads = [WorkerLoad(i, sent[i], usage, sent[i]) for i, usage in enumerate([0.1, 0.6])]
        sent[strategy.choose(loads, None)] += 1
    assert sent[0] > sent[1] > 5


@settings(max_examples=40)
@given(st.lists(KEYS, min_size=1, unique_by=key_bytes), st.integers(2, 8), st.data())
def test_consistent_hash_moves_only_the_keys_of_a_lost_worker(keys, n, data):
    loads = loads_of(*[0] * n)
    lost = data.draw(st.integers(0, n - 1))
    rest = [load for load in loads if load.rank != lost]
    before = [strategy_of("consistent_hash").choose(loads, key) for key in keys]
    one = strategy_of("consistent_hash")
    after = [one.choose(rest, key) for key in keys]
    again = [one.choose(loads, key) for key in keys]
    assert again == before
    assert all(b in (a, lost) for a, b in zip(after, before, strict=True))
    assert lost not in after


def test_consistent_hash_serves_several_threads():
    strategy = strategy_of("consistent_hash")

    def choose(ranks):
        loads = [WorkerLoad(rank) for rank in ranks]
        return all(strategy.choose(loads, f"key {i}") in ranks for i in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(choose, [(0, 1), (2, 3), (4,), (0, 5)] * 5))


def test_consistent_hash_spreads_keys_over_all_workers():
    strategy = strategy_of("consistent_hash")
    share = Counter(strategy.choose(loads_of(0, 0, 0, 0), f"conversation {i}") for i in range(4000))
    assert len(share) == 4
    assert min(share.values()) > 500


@given(KEYS, KEYS)
def test_different_keys_are_different_bytes(one, other):
    def shape(key):
        # Equal to Python, and different keys here: True and 1 do not come from KEYS.
        return (type(key).__name__, tuple(map(shape, key)) if isinstance(key, tuple) else key)

    assert (key_bytes(one) == key_bytes(other)) == (shape(one) == shape(other))


def test_a_function_can_be_a_strategy_and_is_held_to_what_it_was_offered():
    assert strategy_of(lambda loads, key: loads[-1].rank).choose(loads_of(0, 0), "k") == 1
    with pytest.raises(ValueError, match=r"chose rank 7, it was offered \[0, 1\]"):
        strategy_of(lambda loads, key: 7).choose(loads_of(0, 0), None)
    with pytest.raises(ValueError, match=r"chose rank 0, it was offered \[1, 2\]"):
        strategy_of(lambda loads, key: 0).choose(loads_of(0, 0, 0)[1:], None)


@pytest.mark.parametrize(
    ("which", "error", "says"), [("fastest", ValueError, "round_robin, least"), (3, TypeError, "function")]
)
def test_unknown_strategies_are_refused(which, error, says):
    with pytest.raises(error, match=says):
        strategy_of(which)


@pytest.mark.parametrize(
    ("which", "sticky", "needs_key", "needs_usage"),
    [
        ("round_robin", False, False, False),
        ("least_outstanding", False, False, False),
        ("least_loaded", False, False, True),
        ("consistent_hash", True, True, False),
        (lambda loads, key: 0, False, False, False),
    ],
)
def test_what_strategies_need(which, sticky, needs_key, needs_usage):
    strategy = strategy_of(which)
    assert (strategy.sticky, strategy.needs_key, strategy.needs_usage) == (sticky, needs_key, needs_usage)


def test_of_a_worker_of_which_nothing_is_said_nothing_is_outstanding():
    load = WorkerLoad(3)
    assert (load.outstanding, load.usage, load.sent_since_report) == (0, None, 0)


def test_who_has_not_reported_counts_as_idle():
    loads = [WorkerLoad(0, usage=0.4), WorkerLoad(1), WorkerLoad(2, usage=0.9)]
    assert strategy_of("least_loaded").choose(loads, None) == 1
    strategy, loads = strategy_of("least_loaded"), [WorkerLoad(0, usage=0.0), WorkerLoad(1)]
    assert [strategy.choose(loads, None) for _ in range(4)] == [0, 1, 0, 1]


def test_usage_is_in_whatever_unit_workers_report():
    strategy = strategy_of("least_loaded")
    assert [strategy.choose(loads_of(0, 0, 0, usage=[3e9, 3e9, 4e9]), None) for _ in range(3)] == [0, 1, 0]


def test_equally_loaded_workers_take_turns():
    strategy = strategy_of("least_loaded")
    loads = [WorkerLoad(rank, usage=usage) for rank, usage in enumerate((0.2, 0.5, 0.2))]
    assert [strategy.choose(loads, None) for _ in range(4)] == [0, 2, 0, 2]


def test_a_key_goes_to_the_point_that_follows_it_on_the_ring():
    chosen = [strategy_of("consistent_hash").choose(loads_of(0, 0, 0), f"prompt {i}") for i in range(12)]
    # From the definition: blake2b of 8 bytes, 128 points "rank/i" for each rank, the next point upwards.
    assert chosen == [0, 2, 1, 0, 0, 0, 2, 2, 2, 1, 0, 2]
