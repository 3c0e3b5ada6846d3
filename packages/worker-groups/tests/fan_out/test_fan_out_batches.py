import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups._fan_out.batches import (
    GROWTH,
    LEAST_S,
    MAX_BATCH_BYTES,
    MAX_BATCH_ITEMS,
    TARGET_S,
    Backlog,
    BatchSizer,
    Entry,
)


def test_a_batch_takes_about_the_target_time_and_the_last_ones_are_smaller():
    sizer = BatchSizer()
    assert sizer.size(slots=2, remaining=1000) == 1
    for _ in range(10):
        sizer.observe(sizer.size(2, None), sizer.size(2, None) * TARGET_S / 16)
    assert sizer.size(slots=2, remaining=1000) == 16
    assert sizer.size(slots=2, remaining=None) == 16
    assert sizer.size(slots=2, remaining=20) == 5
    assert sizer.size(slots=2, remaining=1) == 1


def test_one_cheap_item_does_not_make_the_next_batch_huge():
    sizer = BatchSizer()
    sizer.observe(1, 1e-9)
    assert sizer.size(1, None) == 4


def test_the_last_batches_are_not_shorter_than_is_worth_sending():
    sizer = BatchSizer(estimate_s=LEAST_S / 100)
    assert [sizer.size(2, remaining) for remaining in (800, 300, 1)] == [200, 100, 100]
    assert BatchSizer(estimate_s=1e-6).size(2, 256) >= 256


def test_slow_items_are_sent_one_by_one():
    sizer = BatchSizer(estimate_s=3.0)
    assert sizer.size(1, 100) == 1


def test_a_fixed_size_is_kept():
    sizer = BatchSizer(fixed=7)
    sizer.observe(7, 100.0)
    assert sizer.size(64, 3) == 7


def backlog_of(items, length=None):
    refused = []
    return Backlog(iter(items), pickle.dumps, lambda i, e: refused.append(i), length), refused


def test_an_item_that_does_not_pickle_is_refused_by_its_index():
    backlog, refused = backlog_of([0, lambda: 0, 2])
    assert [entry.index for entry in backlog.take(10)] == [0, 2]
    assert refused == [1]
    assert backlog.remaining == 0


def test_the_source_is_read_as_late_as_possible():
    read = []

    def source():
        for i in range(100):
            read.append(i)
            yield i

    backlog, _ = backlog_of(source())
    backlog.take(3)
    assert read == [0, 1, 2]
    assert backlog.remaining is None


def test_large_items_make_small_batches_and_none_is_lost():
    backlog, _ = backlog_of([b"x" * (MAX_BATCH_BYTES // 2 + 1)] * 3, length=3)
    assert [len(backlog.take(10)) for _ in range(4)] == [1, 1, 1, 0]


def test_what_was_lost_with_its_host_has_no_neighbours_again():
    backlog, _ = backlog_of(range(2, 4), length=2)
    backlog.take(0)
    backlog.send_again([Entry(0, b"", losses=1), Entry(1, b"", losses=1)])
    assert [[e.index for e in backlog.take(10)] for _ in range(3)] == [[0], [1], [0, 1]]


def test_only_what_was_lost_repeatedly_is_suspect():
    backlog, _ = backlog_of(range(2, 3), length=1)
    assert not backlog.next_is_suspect
    backlog.send_again([Entry(0, b"", losses=1), Entry(1, b"", losses=2)])
    assert not backlog.next_is_suspect
    backlog.take(1)
    assert backlog.next_is_suspect


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 200))
def test_every_item_is_taken_once(sizes, length):
    backlog, _ = backlog_of(range(length), length=length)
    taken = []
    for size in sizes * (length + 1):
        batch = backlog.take(size)
        assert len(batch) <= size
        taken += [entry.index for entry in batch]
        assert backlog.remaining == length - len(taken)
        if len(taken) == length:
            break
    assert taken == list(range(length))


def test_estimates_follow_what_is_measured_and_an_empty_batch_teaches_nothing():
    sizer = BatchSizer()
    sizer.observe(0, 9.0)
    assert sizer.estimate_s is None
    sizer.observe(1, 1.0)
    assert sizer.estimate_s == 1.0
    sizer.observe(4, 8.0)
    assert sizer.estimate_s == pytest.approx(0.7 * 1.0 + 0.3 * 2.0)


def test_a_batch_is_at_most_four_times_the_largest_measured_one():
    sizer = BatchSizer()
    sizer.observe(3, 3e-9)
    sizer.observe(2, 2e-9)
    assert sizer.size(1, None) == 3 * GROWTH


def test_a_known_function_gets_batches_of_the_full_size_at_once_but_no_larger_than_the_limit():
    assert BatchSizer(estimate_s=TARGET_S / 100).size(1, None) == 100
    assert BatchSizer(estimate_s=0.0).size(1, None) == MAX_BATCH_ITEMS


def test_batches_shrink_as_the_items_run_out():
    sizer = BatchSizer(estimate_s=TARGET_S / 100)
    assert [sizer.size(2, n) for n in (401, 400, 399, 397, 396, 9)] == [100, 100, 100, 100, 99, 4]


def test_nothing_remains_of_a_source_without_a_length_once_it_has_ended():
    backlog, _ = backlog_of(iter(range(2)))
    assert backlog.remaining is None
    assert [entry.index for entry in backlog.take(3)] == [0, 1]
    assert backlog.remaining == 0
    assert backlog.take(1) == []


def test_a_source_that_gives_more_than_its_length_is_read_to_its_end():
    backlog, _ = backlog_of(range(3), length=1)
    backlog.take(2)
    assert backlog.remaining == 0
    assert [entry.index for entry in backlog.take(5)] == [2]


def test_what_is_sent_again_counts_and_comes_first_in_its_order():
    backlog, _ = backlog_of(range(5), length=5)
    first = backlog.take(3)
    backlog.send_again(first[1:])
    assert backlog.remaining == 4
    backlog.send_again(first[:1])
    assert backlog.remaining == 5
    assert [entry.index for entry in backlog.take(4)] == [0, 1, 2, 3]
    assert backlog.remaining == 1


def test_a_batch_may_be_exactly_as_large_as_the_limit():
    half = Entry(0, b"x" * (MAX_BATCH_BYTES // 2))
    backlog, _ = backlog_of([])
    backlog.send_again([half, half, Entry(1, b"x")])
    assert [len(backlog.take(10)) for _ in range(2)] == [2, 1]


def test_what_a_batch_holds_is_some_megabytes():
    backlog, _ = backlog_of([])
    backlog.send_again([Entry(i, b"x" * (1 << 20)) for i in range(10)])
    assert 2 <= len(backlog.take(10)) <= 8


def test_one_item_larger_than_the_limit_goes_alone():
    backlog, _ = backlog_of([])
    backlog.send_again([Entry(0, b"x"), Entry(1, b"x" * (MAX_BATCH_BYTES + 1)), Entry(2, b"x")])
    assert [[e.index for e in backlog.take(10)] for _ in range(3)] == [[0], [1], [2]]


def test_an_item_that_was_lost_waits_for_a_batch_of_its_own():
    backlog, _ = backlog_of([])
    backlog.send_again([Entry(0, b""), Entry(1, b"", losses=1), Entry(2, b""), Entry(3, b"")])
    assert [[e.index for e in backlog.take(10)] for _ in range(3)] == [[0], [1], [2, 3]]


@pytest.mark.parametrize(("losses", "suspect"), [(0, False), (1, False), (2, True), (3, True)])
def test_two_losses_make_a_suspect(losses, suspect):
    assert Entry(0, b"", losses=losses).suspect is suspect
    backlog, _ = backlog_of([])
    assert backlog.next_is_suspect is False
    backlog.send_again([Entry(0, b"", losses=losses)])
    assert backlog.next_is_suspect is suspect


def test_an_item_is_suspect_once_two_hosts_were_lost_with_it():
    entry = Entry(3, b"")
    seen = [entry.suspect]
    for _ in range(2):
        entry.losses += 1
        seen.append(entry.suspect)
    assert seen == [False, False, True]
    assert entry.attempts == 1, "it is being tried for the first time"
