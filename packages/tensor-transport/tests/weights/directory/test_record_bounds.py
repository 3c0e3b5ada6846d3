"""Where leases, windows, numbers and names of versions end: there, and neither before nor after."""

import pytest
from authors import PLAN, Author, enter

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    StaleVersionError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.weights._directory.ballots import Ballots
from raycrew.tensor_transport.weights._directory.lineage import Lineage
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.versions import Begin, Finish

ORDERS = pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a")])


def asked(record, *receivers, **more):
    """A version that was asked for, with its recipients."""
    number = record.reserve(0, list(receivers), None, **more)
    enter(record, number, **{name: name for name in receivers})
    return number


def test_a_receiver_may_be_silent_for_a_lease_and_no_longer():
    record, lease_s = Record(lease_s=10), 10
    number, author = asked(record, "r"), Author(record)
    author.begin(0)
    author.put(0, count=1)
    record.news(2, number, "r", "n", (0,))
    assert record.credit(9, number, 0, "publisher 0", 4, 8), "who asks whether it may put more is not silent"
    assert record.next_expiry() == 2 + lease_s
    assert record.decision(11.9, number) is None
    assert record.decision(2 + lease_s, number) == "aborted"
    assert record.reason(12, number) == "receivers ['r'] are silent since 10 s"


@pytest.mark.parametrize(
    "say",
    [
        lambda author: author.put(3, count=1),
        lambda author: author.record.credit(3, author.number, 0, "publisher 0", 4, 4),
    ],
)
def test_a_publisher_may_be_silent_for_a_lease_after_whatever_it_said(say):
    author = Author(Record(lease_s=10))
    author.begin(1)
    assert author.record.next_expiry() == 11
    say(author)
    assert author.record.next_expiry() == 13
    assert author.record.decision(12.9, author.number) is None
    assert author.record.decision(13, author.number) == "aborted"


def test_a_receiver_that_lacks_a_bucket_of_a_complete_version_is_silent_and_one_that_has_all_is_not():
    for taken, state in ((1, "aborted"), (2, None)):
        record = Record(lease_s=10)
        number = asked(record, "r")
        Author(record).publish()
        record.news(0, number, "r", "n", (0,))
        record.took(1, number, "r", (taken,))
        assert record.decision(11, number) == state


@pytest.mark.hostile
@pytest.mark.parametrize("last", ["had all", "left"])
def test_what_a_receiver_said_before_its_last_word_and_comes_later_keeps_no_version(last):
    record = Record(keep=1)
    author = Author(record)
    number = author.publish()
    record.offer(0, number, receiver="r", node="n")
    if last == "had all":
        record.took(1, number, "r", (2,))
    else:
        record.leave(1, "r")
    record.took(1, number, "r", (1,))
    author.publish()
    assert record.collect(1, "node") == [f"{number}/0/0", f"{number}/0/1"]


@pytest.mark.hostile
def test_what_a_node_has_it_has_though_an_earlier_word_of_it_comes_later():
    record = Record(fanout=1)
    number = Author(record).publish()
    record.offer(0, number, receiver="first", node="n")
    record.took(0, number, "first", (2,))
    record.took(0, number, "first", (1,))
    assert len(record.offer(0, number, receiver="second", node="m").news.buckets) == 2


def test_what_is_ahead_of_the_slowest_has_to_fit_the_window_with_what_is_to_come():
    record = Record()
    number, author = asked(record, "r"), Author(record)
    author.begin()
    assert record.credit(0, number, 0, "publisher 0", 100, 4), "what is larger than the window goes alone"
    author.put(count=1)
    assert record.credit(0, number, 0, "publisher 0", 4, 8)
    for size_bytes, window_bytes in ((5, 8), (4, 7)):
        assert record.credit(0, number, 0, "publisher 0", size_bytes, window_bytes) is None


def test_of_a_part_that_a_receiver_has_not_heard_of_it_has_nothing():
    record = Record()
    number = asked(record, "r")
    authors = [Author(record, part, 2) for part in range(2)]
    for author in authors:
        author.begin()
        author.put(count=1)
        assert record.credit(0, number, author.part, author.name, 4, 4) is None
    record.news(0, number, "r", "n", (0, 0))
    record.took(0, number, "r", (1, 0))
    found = [record.credit(0, number, author.part, author.name, 4, 4) for author in authors]
    assert found == [True, None]


@pytest.mark.hostile
def test_there_is_no_room_in_what_is_over_or_has_no_such_part():
    record, author = Record(), None
    author = Author(record, 0, 2)
    author.begin(version=1)
    for number, part, why in ((99, 0, "it is over"), (1, 1, "begun anew, without part 1")):
        with pytest.raises(UpdateAbortedError, match=why):
            record.credit(0, number, part, author.name, 4, 4)


@pytest.mark.hostile
@pytest.mark.parametrize("count", [1, 3])
def test_a_part_is_finished_with_as_many_buckets_as_were_put(count):
    author = Author(Record())
    author.begin()
    author.put()
    with pytest.raises(WeightUpdateError, match=f"version 1: 2 of {count} buckets were announced"):
        author.record.finish(0, 1, Finish(0, author.name, count, None, 0.0, 0.0, ()))


def test_one_version_is_kept_and_a_minute_of_silence_waited_for_unless_told_otherwise():
    record = Record()
    author = Author(record)
    author.publish(), author.publish(), author.begin(5)
    assert record.next_expiry() == 65
    with pytest.raises(BucketFetchError, match=r"version 1 is not kept \(keep=1\); there are \[2\]"):
        record.offer(5, 1)


def test_a_version_before_the_one_that_is_held_can_be_gone_back_to():
    record = Record(keep=2)
    with pytest.raises(BucketFetchError, match="no version was published yet") as empty:
        record.chain(0, None, None)
    assert empty.value.version == 0
    author = Author(record)
    author.publish(), author.publish()
    assert record.chain(0, 1, 2) == [1] and record.chain(0, None, 1) == [2]
    assert record.chain(0, None, 2) == record.chain(0, 1, 1) == []


def test_what_is_not_known_any_more_is_not_waited_for_and_what_comes_is():
    record = Record()
    for _ in range(105):
        record.reserve(0, ["1"], None)
    assert len(record.status(0)) <= 102
    for number in (0, 1):
        with pytest.raises(BucketFetchError, match=f"version {number} is not kept"):
            record.offer(0, number)
    assert record.offer(0, 106) is None


def test_why_versions_were_given_up_is_told_of_each():
    record = Record()
    numbers = [record.reserve(0, ["1"], None) for _ in range(3)]
    record.abort(0, numbers[2], "no room")
    assert [record.reason(0, number) for number in numbers] == [*["another update was begun"] * 2, "no room"]


def test_holders_are_told_of_the_version_that_they_hold():
    record = Record(keep=3)
    author = Author(record)
    for receiver in "abc":
        record.hold(0, receiver, author.publish())
    record.hold(0, "d", 2)
    assert [version.holders for version in record.status(0)] == [("a",), ("b", "d"), ("c",)]


@ORDERS
def test_only_the_publisher_that_was_made_last_publishes(one, other):
    record = Record()
    before, now = Author(record, name=one), Author(record, name=other)
    with pytest.raises(StaleVersionError, match=f"publisher {one} of part 0 was replaced by {other}"):
        before.begin()
    assert now.begin() == 1
    with pytest.raises(StaleVersionError, match="was replaced"):
        record.finish(0, 1, Finish(0, one, 0, None, 0.0, 0.0, ()))


@ORDERS
def test_a_publisher_that_was_replaced_takes_nothing_of_the_newer_one_along(one, other):
    record = Record()
    Author(record, name=one)
    newer = Author(record, name=other)
    newer.publish()
    assert not record.retire(0, 0, one) and record.newest(0) == 1
    assert record.retire(0, 0, other) and record.newest(0) is None
    assert record.collect(0, newer.scope) == ["1/0/0", "1/0/1"]


@ORDERS
def test_a_node_waits_for_the_one_before_whoever_else_is_gone(one, other):
    record = Record(fanout=1)
    author = Author(record)
    author.begin()
    author.put(count=1)
    assert record.news(0, 1, one, "first", (0,)).buckets
    assert record.news(0, 1, other, "second", (0,)) is None
    record.leave(0, one)
    assert record.news(0, 1, "third", "third", (0,)) is None
    assert record.news(0, 1, other, "second", (0,)).buckets
    record.took(0, 1, other, (1,))
    assert record.news(0, 1, "third", "third", (0,)).buckets


@ORDERS
def test_what_somebody_else_published_is_not_confirmed(one, other):
    record = Record()
    asked(record, "r", key="key")
    Author(record, name=one).publish()
    record.confirm(0, 1, "key", other)
    assert "somebody else published" in record.reason(0, 1)


def test_what_is_not_complete_is_not_confirmed():
    record = Record()
    asked(record, "r", key="key")
    author = Author(record)
    author.begin()
    record.confirm(0, 1, "key", author.name)
    assert record.decision(0, 1) == "aborted"


@ORDERS
def test_each_recipient_shows_its_own_ballot_whatever_they_are_called(one, other):
    ballots = Ballots(["x", "y"], "")
    assert ballots.admit(3, one, "x") == ballots.admit(3, other, "y") == ""
    assert ballots.receivers == [one, other]
    for receiver, ballot in ((one, "y"), (other, "x")):
        with pytest.raises(WeightUpdateError, match=f"two receivers are called {receiver}"):
            ballots.admit(3, receiver, ballot)


def test_a_publisher_that_is_made_known_again_goes_on():
    record = Record()
    author = Author(record)
    author.begin()
    author.put()
    Author(record)
    author.finish()
    assert record.newest(0) == 1


@pytest.mark.hostile
def test_a_part_of_a_step_before_leaves_the_one_that_is_being_published():
    record = Record()
    first, second = (Author(record, part, 2) for part in range(2))
    first.publish(version=2)
    with pytest.raises(StaleVersionError, match="version 2 is being published, not 1") as stale:
        second.begin(version=1)
    assert stale.value.version == 1
    assert second.publish(version=2) == 2 == record.newest(0)


@pytest.mark.hostile
def test_a_number_below_the_last_one_is_not_used_again_even_if_it_was_given_up():
    record = Record(keep=5)
    author = Author(record)
    author.begin(version=1)
    record.abort(0, 1, "no room")
    assert author.publish(version=3) == 3
    for version in (1, 2, 3):
        with pytest.raises(StaleVersionError, match=f"the last version is 3: {version} is not above it"):
            author.begin(version=version)
    assert author.publish(version=4) == record.newest(0) == 4


@pytest.mark.hostile
@pytest.mark.parametrize(("one", "other"), [(2, 3), (3, 2)])
def test_all_parts_name_one_number_of_parts(one, other):
    record = Record()
    assert Author(record, 0, one).begin(version=1) == 1
    with pytest.raises(WeightUpdateError, match=f"version 1 has {one} parts, not {other}"):
        Author(record, 1, other).begin(version=1)


def test_a_change_of_other_parts_is_one_of_something_else():
    lineage, x, y = Lineage(), frozenset("x"), frozenset("y")
    lineage.note(1, {0: None, 1: None})
    lineage.note(2, {0: x})
    assert lineage.bases({0: x, 1: y}) == {2}
    lineage.note(3, {0: x, 1: y})
    assert lineage.bases({0: x, 1: y}) == {2, 3} and lineage.bases({0: x}) == {3}
    assert lineage.bases({1: x, 2: y}) == {3}


def test_what_changes_is_told_of_each_part():
    record = Record(keep=3)
    author = Author(record)
    author.publish()

    def begin(*names):
        return record.begin(
            0, Begin(0, 1, author.name, author.scope, None, PLAN.digest, PLAN, frozenset(names))
        )

    for number, names in ((2, "x"), (3, "xy"), (4, "y")):
        author.number = begin(*names)
        author.put()
        assert author.finish().version == number
    assert [record.update(0, number).bases for number in (2, 3, 4)] == [{1}, {1, 2}, {3}]
    assert record.chain(0, None, None) == [1, 3, 4] and record.chain(0, None, 2) == [3, 4]
