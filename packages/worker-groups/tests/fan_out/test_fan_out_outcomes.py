import pickle

import pytest

from raycrew.worker_groups import (
    FanOutError,
    ItemCrashedError,
    ItemError,
    ItemOutcome,
    ItemTimeoutError,
)
from raycrew.worker_groups.errors import WorkerGroupError


def test_an_error_names_the_item_and_only_more_than_one_attempt():
    assert str(ItemError(4, "it broke")) == "item 4 failed: it broke"
    assert str(ItemError(4, "it broke", 2)) == "item 4 failed after 2 attempts: it broke"
    assert ItemError(4, "it broke").attempts == 1


@pytest.mark.parametrize("kind", [ItemError, ItemTimeoutError, ItemCrashedError])
def test_an_error_survives_pickling_with_all_it_says(kind):
    error = kind(4, "it broke", 3)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.index, again.reason, again.attempts, str(again)) == (4, "it broke", 3, str(error))
    assert again.__notes__ == ["a note"]


def test_only_a_timeout_is_one():
    assert issubclass(ItemTimeoutError, TimeoutError)
    assert not issubclass(ItemCrashedError, TimeoutError)
    assert issubclass(ItemCrashedError, ItemError)
    assert issubclass(ItemError, WorkerGroupError)


def test_the_group_counts_failures_and_all_items_and_keeps_the_results():
    failures = [ItemError(5, "first"), ItemError(1, "second")]
    error = FanOutError(failures, {0: "a", 2: "b", 3: "c"})
    assert str(error).startswith("2 of 5 items failed; first: item 5 failed: first")
    assert list(error.exceptions) == failures
    assert error.results == {0: "a", 2: "b", 3: "c"}


def test_a_part_of_the_group_keeps_the_results():
    error = FanOutError([ItemTimeoutError(0, "slow"), ItemCrashedError(1, "gone")], {2: "b"})
    late, rest = error.split(ItemTimeoutError)
    assert [failure.index for failure in late.exceptions] == [0]
    assert [failure.index for failure in rest.exceptions] == [1]
    assert late.results == rest.results == {2: "b"}
    assert isinstance(late, FanOutError)


def test_the_group_survives_pickling_with_all_it_says():
    error = FanOutError([ItemTimeoutError(0, "slow"), ItemCrashedError(1, "gone", 2)], {2: "b"})
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.results) == (FanOutError, str(error), {2: "b"})
    assert [(type(one), one.attempts) for one in again.exceptions] == [
        (ItemTimeoutError, 1),
        (ItemCrashedError, 2),
    ]
    assert again.__notes__ == ["a note"]


def test_a_good_outcome_gives_its_value_even_none():
    assert ItemOutcome(0, 7).ok is True
    assert ItemOutcome(0, 7).result() == 7
    assert ItemOutcome(0).result() is None
    assert (ItemOutcome(3).index, ItemOutcome(3).attempts, ItemOutcome(3).seconds) == (3, 1, 0.0)


def test_a_failed_outcome_raises_its_error():
    error = ItemError(0, "it broke")
    outcome = ItemOutcome(0, error=error)
    assert outcome.ok is False
    with pytest.raises(ItemError) as caught:
        outcome.result()
    assert caught.value is error
