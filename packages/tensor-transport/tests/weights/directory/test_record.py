"""What a directory decides, without a clock: every method is given the time."""

import pytest
from authors import Author, enter

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    StaleVersionError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.weights._directory.lineage import Lineage
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.relay import choose_fanout, relay_parent
from raycrew.tensor_transport.weights._directory.versions import Begin, Begun, Finish
from raycrew.tensor_transport.weights._receiving.feeds import PlanMemory
from raycrew.tensor_transport.weights._update.manifest import BucketPlan, TensorEntry


def test_a_version_is_complete_with_its_last_part():
    record = Record()
    authors = [Author(record, part, 2) for part in range(2)]
    assert authors[0].publish(version=1) == 1
    assert record.newest(0) is None
    assert authors[0].begin(version=2) is None, "others are not done with the version before"
    assert authors[1].publish(version=1) == 1
    assert record.newest(0) == 1
    assert record.update(0, 1).size_bytes == 16
    assert authors[0].begin(version=2) is not None
    with pytest.raises(BucketFetchError, match=r"version 9 is not kept .*; there are \[1\]"):
        record.update(0, 9)


def test_votes_decide_and_the_first_word_holds():
    record = Record(keep=1)
    author = Author(record)
    number = record.reserve(0, ["1", "2"], 10)
    enter(record, number, a="1", b="2")
    assert author.publish() == number
    record.vote(0, number, "a", True, "")
    assert record.decision(0, number) is None
    record.vote(0, number, "b", True, "")
    assert record.decision(0, number) == "committed"
    assert not record.abort(1, number, "too late")
    assert record.holders == {"a": 1, "b": 1}
    again = record.reserve(0, ["3", "4"], 10)
    enter(record, again, a="3", b="4")
    author.publish()
    record.vote(0, again, "a", True, "")
    record.vote(0, again, "b", False, "no room")
    record.vote(0, again, "b", True, "")
    assert record.decision(0, again) == "aborted"
    assert record.reason(0, again) == "receiver b: no room"
    assert record.newest(0) == 1


@pytest.mark.hostile
@pytest.mark.parametrize("end", [Record.arrive, Record.leave])
@pytest.mark.parametrize("done", ["admitted", "took", "voted"])
def test_a_voter_that_is_gone_or_made_again_ends_its_version_wherever_it_was(end, done):
    record = Record()
    number = record.reserve(0, ["1", "2"], None)
    enter(record, number, a="1", b="2")
    Author(record).publish()
    if done != "admitted":
        assert record.news(0, number, "b", "n", (2,)).done
    record.vote(0, number, "b" if done == "voted" else "a", True, "")
    end(record, 0, "stranger")
    assert record.decision(0, number) is None
    end(record, 0, "b")
    assert record.decision(0, number) == "aborted" and "receiver b" in record.reason(0, number)


def test_a_deadline_and_a_new_reservation_end_a_version():
    record = Record()
    author = Author(record)
    first = record.reserve(0, ["1"], 5)
    author.publish()
    assert record.decision(4.9, first) is None
    assert record.next_expiry() == 5
    assert record.decision(5, first) == "aborted"
    second = record.reserve(6, ["1"], None)
    third = record.reserve(7, ["1"], None)
    assert record.decision(8, second) == "aborted"
    assert record.decision(8, third) is None


def test_the_last_versions_are_kept_and_the_others_freed_once():
    record = Record(keep=2)
    author = Author(record)
    for _ in range(4):
        author.publish()
    assert record.collect(0, "node") == ["1/0/0", "1/0/1", "2/0/0", "2/0/1"]
    assert record.collect(0, "node") == []
    with pytest.raises(BucketFetchError, match=r"there are \[3, 4\]"):
        record.offer(0, 2)


def test_a_route_is_told_with_the_time_that_is_left():
    record = Record()
    author = Author(record)

    def begun(now):
        return record.start(now, Begin(0, 1, author.name, "node", None, "", None, None))

    first = record.reserve(10, ["1"], 5, "key", route="cable")
    assert begun(12) == Begun(first, "cable", 3, True, ())
    assert record.abort(12, first, "given up")
    number = record.reserve(20, ["1"], None)
    assert begun(20) == Begun(number, "", None, False, ())
    assert record.abort(20, number, "given up")
    assert begun(20) == Begun(number + 1, "", None, False, ())


def test_what_nobody_has_to_confirm_is_left_as_it_is():
    record = Record(keep=2)
    Author(record).publish()
    record.confirm(0, 1, "key", "somebody")
    record.confirm(0, 99, "key", "somebody")
    Author(record).begin()
    record.confirm(0, 2, "key", "somebody")
    assert [(status.version, status.state) for status in record.status(0)] == [(1, "committed"), (2, "open")]


@pytest.mark.hostile
def test_a_trainer_of_another_size_waits_until_a_version_is_decided():
    record = Record()
    number = record.reserve(0, ["1"], None)
    enter(record, number, a="1")
    Author(record).publish()
    more = Author(record, 1, 2)
    assert more.begin(1, version=number + 1) is None
    record.vote(2, number, "a", True, "")
    assert record.decision(2, number) == "committed"
    assert more.begin(2, version=number + 1) == number + 1


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_no_version_goes_while_there_are_no_more_than_are_kept(keep):
    record = Record(keep=keep)
    author = Author(record)
    for number in range(1, 9):
        author.publish()
        held = [status.version for status in record.status(0) if status.size_bytes]
        assert held == list(range(max(1, number - keep + 1), number + 1))


def test_what_somebody_reads_is_kept_until_its_lease_ends():
    record = Record(keep=1, lease_s=10)
    author = Author(record)
    author.publish()
    assert record.news(0, 1, "slow", "n", (0,)).done
    author.publish(1)
    assert record.collect(1, "node") == []
    assert author.begin(2) is None, "the publisher waits for who lags"
    assert author.begin(10) == 3
    assert record.collect(10, "node") == ["1/0/0", "1/0/1"]


@pytest.mark.parametrize(
    ("keep", "asked", "count", "counts"),
    [(1, True, 1, True), (0, True, 1, False), (1, False, 1, False), (1, True, 2, False)],
)
def test_one_bucket_counts_as_had_where_it_stays_until_all_have_voted(keep, asked, count, counts):
    record = Record(keep=keep, lease_s=10)
    author = Author(record)
    number = record.reserve(0, ["ballot"], None) if asked else 1
    if asked:
        enter(record, number, reader="ballot")
    author.begin(), author.put(count=count)
    record.finish(0, number, Finish(0, author.name, count, None, 0.0, 0.0, ()))
    assert record.news(0, number, "reader", "n", (0,)).counts is counts
    version = record.versions[number]
    assert version.has_taken("reader", version.parts[0].buckets[-1]) is counts
    assert ("reader" in version.fetching) is not counts


def test_what_a_receiver_that_leaves_was_reading_is_freed():
    record = Record(keep=1, lease_s=1e9)
    author = Author(record)
    author.publish()
    assert record.news(0, 1, "slow", "n", (0,)).done
    author.publish(1)
    assert record.collect(1, "node") == []
    record.leave(2, "slow")
    assert record.collect(2, "node") == ["1/0/0", "1/0/1"]
    assert author.begin(2) == 3


def test_credit_is_what_the_slowest_voter_has():
    record = Record(keep=0)
    author = Author(record)
    number = record.reserve(0, ["1", "2"], None)
    enter(record, number, fast="1", slow="2")
    author.begin()
    assert record.credit(0, number, 0, "publisher 0", 4, 4)
    author.put(count=1)
    for receiver in ("fast", "slow"):
        assert record.news(0, number, receiver, "n", (0,)).buckets
    assert record.credit(0, number, 0, "publisher 0", 4, 4) is None
    record.took(0, number, "fast", (1,))
    assert record.credit(0, number, 0, "publisher 0", 4, 4) is None
    record.took(0, number, "slow", (1,))
    assert record.credit(0, number, 0, "publisher 0", 4, 4)
    assert record.collect(0, "node") == ["1/0/0"]


def test_silence_ends_a_version():
    record = Record(lease_s=10)
    author = Author(record)
    number = author.begin(0)
    author.put(5, count=1)
    with pytest.raises(UpdateAbortedError, match=r"parts \[0\] are silent since 10 s"):
        record.offer(15, number)
    with pytest.raises(UpdateAbortedError):
        author.finish(15)
    assert record.collect(15, "node") == ["1/0/0"]


def test_a_voter_that_leaves_ends_its_version_and_no_other():
    record = Record()
    author = Author(record)
    author.publish()
    record.news(0, 1, "a", "n", (0,))
    record.leave(0, "a")
    assert record.newest(0) == 1
    number = record.reserve(0, ["1"], None)
    enter(record, number, a="1")
    author.begin()
    author.put(count=1)
    record.news(0, number, "a", "n", (0,))
    record.leave(0, "a")
    assert record.reason(0, number) == "receiver a left"


def test_numbers_rise_and_stale_publishers_are_refused():
    record = Record(keep=5)
    author = Author(record)
    assert author.begin(version=7) == 7
    author.put()
    author.finish()
    with pytest.raises(StaleVersionError, match="the last version is 7: 7 is not above it"):
        author.begin(version=7)
    assert Author(record, name="newer").publish() == 8
    with pytest.raises(StaleVersionError, match="was replaced by newer"):
        author.begin()
    assert not record.retire(0, 0, author.name)
    assert record.newest(0) == 8


def test_partial_versions_can_be_added_where_all_changes_since_are_among_theirs():
    lineage, x, xy = Lineage(), {0: frozenset("x")}, {0: frozenset("xy")}
    assert lineage.bases(x) == frozenset()
    lineage.note(1, {0: None})
    lineage.note(2, x)
    assert lineage.bases(x) == {1, 2}
    lineage.note(3, xy)
    assert lineage.bases(x) == {3}
    assert lineage.bases(xy) == {1, 2, 3}
    assert lineage.bases({0: None}) is None
    lineage.note(4, {0: None})
    assert lineage.bases(x) == {4}
    lineage.note(5, x | {1: frozenset("y")})
    assert lineage.bases(x | {1: frozenset("yz")}) == {4, 5}
    lineage.note(6, x | {1: frozenset("y")})
    assert lineage.bases(x | {1: frozenset("yz")}) == {4, 5, 6}
    assert lineage.bases(x) == {6}, "of fewer parts it lacks what the others changed"


def test_a_relay_is_a_chain_or_a_tree():
    nodes = list("abcdefg")
    assert [relay_parent(nodes, n, 1) for n in nodes] == [None, *"abcdef"]
    assert [relay_parent(nodes, n, 2) for n in nodes] == [None, *"aabbcc"]
    assert {relay_parent(nodes, n, None) for n in nodes} == {None}
    assert choose_fanout(1, 100) is None
    assert choose_fanout(8, 100) == 1, "many buckets: a chain is busy all the time"
    assert choose_fanout(64, 1) in (2, 3), "one bucket: a tree is not as deep"
    assert choose_fanout(2, 1) in (None, 1)


def test_a_node_of_a_relay_waits_for_the_one_before():
    record = Record(fanout=1)
    author = Author(record)
    author.begin()
    author.put(count=1)
    assert record.news(0, 1, "a", "first", (0,)).buckets
    assert record.news(0, 1, "b", "second", (0,)) is None
    record.took(0, 1, "a", (1,))
    assert record.news(0, 1, "b", "second", (0,)).buckets
    record.leave(0, "a")
    author.put(count=0)
    assert record.news(0, 1, "c", "third", (0,)) is None
    record.took(0, 1, "b", (1,))
    assert record.news(0, 1, "c", "third", (0,)).buckets


@pytest.mark.hostile
def test_a_node_of_a_relay_does_not_wait_for_one_that_gave_up():
    record = Record(fanout=1)
    Author(record).publish()
    assert record.news(0, 1, "a", "first", (0,)).buckets
    assert record.news(0, 1, "b", "second", (0,)) is None
    record.vote(0, 1, "a", False, "no room")
    assert record.news(0, 1, "b", "second", (0,)).buckets


def plan_of(rows):
    return BucketPlan((TensorEntry("x", "uint8", (rows,), 0, 0, rows),), (rows,))


def test_an_offer_of_more_parts_than_plans_are_remembered_is_understood_again():
    memory = PlanMemory(limit=3)
    parts = [plan_of(rows) for rows in range(1, 6)]
    digests = [plan.digest for plan in parts]
    for _ in range(3):
        sent = [None if plan.digest in memory.digests else plan for plan in parts]
        assert memory.find(sent, digests) == parts
    changed = [plan_of(rows) for rows in range(10, 20)]
    for plan in changed:  # One part that changes beside four that do not.
        now = [*parts[:4], plan]
        sent = [None if one.digest in memory.digests else one for one in now]
        assert memory.find(sent, [one.digest for one in now]) == now
    assert len(memory.digests) == 5


def test_a_receiver_that_has_all_is_not_silent_however_long_it_waits_to_load():
    record = Record(lease_s=10)
    number = record.reserve(0, ["1"], None)
    enter(record, number, r="1")
    author = Author(record)
    author.begin(0)
    author.put(0)
    assert len(record.news(0, number, "r", "node", (0,)).buckets) == 2
    author.finish(1)
    assert record.news(1, number, "r", "node", (2,)).done
    assert record.decision(100, number) is None
    record.vote(100, number, "r", True, "")
    assert record.decision(100, number) == "committed"


@pytest.mark.hostile
def test_a_recipient_that_was_restarted_has_one_vote():
    record = Record(keep=0)
    author = Author(record)
    number = record.reserve(0, ["1", "2"], None)
    enter(record, number, a="1")
    author.publish()
    record.vote(0, number, "a", True, "")
    enter(record, number, again="1")
    record.vote(0, number, "again", True, "")
    record.took(0, number, "again", (2,))
    record.vote(0, number, "a", True, "")
    record.vote(0, number, "a", False, "the one before is not dead at all")
    assert record.decision(0, number) is None
    assert record.collect(0, "node") == [], "the other recipient has to fetch it yet"
    with pytest.raises(UpdateAbortedError, match="another receiver took the place of a"):
        record.news(0, number, "a", "n", (0,))
    enter(record, number, b="2")
    record.vote(0, number, "b", True, "")
    assert record.decision(0, number) == "committed"
    assert record.holders == {"again": number, "b": number}


@pytest.mark.hostile
def test_only_recipients_decide():
    record = Record()
    author = Author(record)
    number = record.reserve(0, ["1", "2"], None)
    with pytest.raises(WeightUpdateError, match="receiver late is not one that decides"):
        enter(record, number, late="")
    with pytest.raises(WeightUpdateError, match="two receivers are called a"):
        enter(record, number, a="1") or enter(record, number, a="2")
    author.publish()
    record.vote(0, number, "late", False, "no room")
    record.vote(0, number, "late", True, "")
    record.vote(0, number, "a", True, "")
    assert record.decision(0, number) is None


@pytest.mark.hostile
def test_a_version_that_was_asked_for_commits_when_it_is_confirmed():
    record = Record()
    author = Author(record)
    first, key = record.reserve(0, ["1"], None, "key"), "key"
    enter(record, first, a="1")
    author.publish()
    record.vote(0, first, "a", True, "")
    assert record.decision(0, first) is None
    with pytest.raises(WeightUpdateError, match="by somebody else"):
        record.confirm(0, first, "", author.name)
    record.confirm(0, first, key, author.name)
    assert record.decision(0, first) == "committed"
    second = record.reserve(0, ["1"], None, key)
    author.publish()
    record.confirm(0, second, key, "another publisher")
    assert "somebody else published" in record.reason(0, second)
    third = record.reserve(0, ["1"], None, key)
    assert author.publish() == third
    with pytest.raises(UpdateAbortedError, match="part 0 was begun again"):
        author.publish()
    assert record.newest(0) == first, "what nobody voted for takes no place"
    assert "part 0 was begun again" in record.reason(0, third)


def test_a_receiver_goes_on_to_hold_what_it_had_when_an_update_is_given_up():
    record = Record(lease_s=10)
    author = Author(record)
    author.publish()
    record.hold(0, "a", 1)
    number = record.reserve(0, ["1"], None)
    enter(record, number, a="1")
    author.begin()
    record.news(0, number, "a", "n", (0,))
    record.abort(0, number, "no room")
    with pytest.raises(UpdateAbortedError):
        record.news(1, number, "a", "n", (0,))
    record.leave(100, "nobody")
    assert record.holders == {"a": 1}


def test_a_vote_says_what_is_held_and_that_nothing_else_is_read():
    record = Record(keep=1, lease_s=10)
    author = Author(record)
    author.publish()
    record.news(0, 1, "a", "n", (0,))
    number = record.reserve(0, ["1"], None)
    enter(record, number, a="1")
    author.publish()
    record.vote(0, number, "a", True, "")
    assert record.holders == {"a": number}
    assert author.begin(1) == number + 1, "nobody reads the first one any more"
