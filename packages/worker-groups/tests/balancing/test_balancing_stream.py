"""Streams, over workers that are a list."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups import WorkerFailureError
from raycrew.worker_groups.balancing import WorkerLoad, strategy_of
from raycrew.worker_groups.balancing._stream import LATER, GoneWorkerError, LostWorkerError, Stream


class FakeWorkers:
    """Workers that finish in an order that the test decides, and can be lost."""

    def __init__(self, n, pick=lambda sent: sent[0]):
        self.ranks = list(range(n))
        self.pick = pick
        self.log = []
        self.most = Counter()
        self.held = Counter()
        self.abandoned = []
        self.loses = {}

    def loads(self):
        return [WorkerLoad(rank, self.held[rank]) for rank in self.ranks]

    def send(self, rank, item):
        assert rank in self.ranks
        self.held[rank] += 1
        self.most[rank] = max(self.most[rank], self.held[rank])
        self.log.append((rank, item.index))
        return (len(self.log), rank, item.value)

    def wait(self, sent):
        return [self.pick(sent)]

    def collect(self, sent):
        _, rank, value = sent
        self.held[rank] -= 1
        if self.loses.get(value, 0):
            self.loses[value] -= 1
            self.ranks.remove(rank)
            raise LostWorkerError from WorkerFailureError(f"rank {rank} died")
        if rank not in self.ranks:
            raise LostWorkerError from WorkerFailureError(f"rank {rank} died")
        return value * 10

    def abandon(self, sent):
        self.abandoned += sent


def stream_over(workers, items, strategy="round_robin", *, key=lambda item: item, most=2, window=None):
    return Stream(workers, strategy_of(strategy), items, key, most, window)


@given(
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(1, 3),
    st.randoms(),
    st.sampled_from(["round_robin", "consistent_hash"]),
)
def test_every_item_is_answered_once_and_no_worker_holds_too_many(n, count, most, random, strategy):
    workers = FakeWorkers(n, random.choice)
    pairs = list(stream_over(workers, range(count), strategy, most=most).pairs())
    assert sorted(pairs) == [(i, i * 10) for i in range(count)]
    assert all(held <= most for held in workers.most.values())
    assert workers.abandoned == []


def test_the_same_key_goes_to_the_same_worker_even_when_that_one_is_full():
    workers = FakeWorkers(3)
    list(stream_over(workers, range(60), "consistent_hash", key=lambda i: i % 5, most=1).pairs())
    by_key = {}
    for rank, index in workers.log:
        by_key.setdefault(index % 5, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in by_key.values())


def test_the_source_is_read_only_as_far_as_workers_and_window_allow():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield read[-1]

    stream = stream_over(FakeWorkers(2, lambda sent: sent[-1]), endless(), window=6)
    pairs = stream.pairs()
    for _ in range(5):  # the first item is never done: everything else in the window is
        next(pairs)
    assert len(read) == 6
    pairs.close()


def test_a_slow_worker_gets_fewer_items():
    workers = FakeWorkers(2, lambda sent: next((one for one in sent if one[1] == 1), sent[0]))
    list(stream_over(workers, range(50)).pairs())
    ranks = Counter(rank for rank, _ in workers.log)
    assert ranks == {0: 2, 1: 48}


def test_items_of_a_lost_worker_go_to_another_one():
    workers = FakeWorkers(3)
    workers.loses = {4: 1}
    pairs = list(stream_over(workers, range(20)).pairs())
    assert sorted(pairs) == [(i, i * 10) for i in range(20)]
    assert len(workers.ranks) == 2


def test_an_item_that_ends_every_worker_ends_only_two_of_them():
    workers = FakeWorkers(4)
    workers.loses = {4: 9}
    with pytest.raises(WorkerFailureError, match="died"):
        list(stream_over(workers, range(20), most=1).pairs())
    assert len(workers.ranks) == 2


def test_closing_a_stream_abandons_what_is_left():
    workers = FakeWorkers(2)
    pairs = stream_over(workers, range(20)).pairs()
    next(pairs)
    pairs.close()
    assert len(workers.abandoned) == 3


def test_a_source_that_has_ended_is_not_asked_again():
    class Twice:
        """Ends, and would go on, as a queue that is polled may."""

        asked = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.asked += 1
            if self.asked == 3:
                raise StopIteration
            return self.asked

    source = Twice()
    assert sorted(result for _, result in stream_over(FakeWorkers(2), source).pairs()) == [10, 20]
    assert source.asked == 3


class Leaving(FakeWorkers):
    """The last worker leaves each time that it was chosen and before anything is sent to it."""

    def send(self, rank, item):
        if rank == self.ranks[-1] and len(self.ranks) > 1:
            self.ranks.pop()
            raise GoneWorkerError
        return super().send(rank, item)


@pytest.mark.parametrize("strategy", ["round_robin", "consistent_hash"])
def test_items_go_to_others_where_workers_leave_before_they_get_them(strategy):
    workers = Leaving(4)
    pairs = sorted(stream_over(workers, range(40), strategy, most=1).pairs())
    assert pairs == [(i, i * 10) for i in range(40)]
    assert workers.ranks == [0]


def test_items_go_to_workers_that_join_and_the_window_grows_with_them():
    workers, seen = FakeWorkers(1), []
    stream = stream_over(workers, range(60), most=4, window=lambda: 2 * len(workers.ranks))
    for pair in stream.pairs():
        seen.append(pair)
        stream.given += 1
        if len(seen) == 10:
            assert workers.most == {0: 2}
            workers.ranks = [0, 1, 2]
    assert len(seen) == 60
    assert sum(workers.most.values()) == 6


def test_a_window_that_gets_smaller_holds_up_the_source_until_enough_was_given_on():
    window, read = [4], []

    def source():
        for i in range(10):
            read.append(i)
            yield i

    stream = stream_over(FakeWorkers(1), source(), most=9, window=lambda: window[0])
    pairs = stream.pairs()
    next(pairs)
    assert len(read) == 4
    window[0], stream.given = 2, 1
    next(pairs)
    assert len(read) == 4
    stream.given = 3
    next(pairs)
    assert len(read) == 5
    pairs.close()


def test_a_source_that_has_nothing_now_is_asked_again_and_holds_up_no_result():
    class Waiting(FakeWorkers):
        def wait(self, sent):
            self.log.append(("waits", len(sent)))
            return super().wait(sent) if sent else []

    workers = Waiting(1)
    items = iter([LATER, 1, 2, LATER, LATER, 3, LATER])
    assert list(stream_over(workers, items).pairs()) == [(0, 10), (1, 20), (2, 30)]
    asked = [what for what in workers.log if what[0] == "waits"]
    assert [n for _, n in asked] == [0, 2, 1, 0, 1]


def test_an_item_goes_to_as_many_workers_as_is_said():
    for most, is_given in ((1, False), (2, True)):
        workers = FakeWorkers(4)
        workers.loses = {7: 2}
        stream = Stream(workers, strategy_of("round_robin"), [7], lambda item: item, 1, max_resends=most)
        if is_given:
            assert list(stream.pairs()) == [(0, 70)]
        else:
            with pytest.raises(WorkerFailureError):
                list(stream.pairs())


def read_ahead(keys):
    """How much of a source is read before the first of 12 items at a time, on 3 workers, is done."""
    read = []
    workers = FakeWorkers(3)

    def source():
        for key in keys:
            read.append(key)
            yield key

    pairs = stream_over(workers, source(), "consistent_hash", key=str, most=4).pairs()
    next(pairs)
    pairs.close()
    return len(read), {rank for rank, _ in workers.log}


def test_what_waits_for_one_worker_leaves_work_for_the_others_but_is_bounded():
    assert len(read_ahead([0] * 16 + list(range(1, 40)))[1]) == 3
    assert read_ahead([0] * 1000)[0] <= 3 * 12
