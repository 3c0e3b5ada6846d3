"""How a publisher without a directory counts its versions, and what those are added to."""

import pytest
import torch

from raycrew.tensor_transport import DirectoryLostError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory.telling import DirectoryTeller, LoneTeller
from raycrew.tensor_transport.weights._update.manifest import Bucket, BucketPlan
from raycrew.tensor_transport.weights._update.spans import Stopwatch

PLAN = BucketPlan((), ())
BUCKETS = [Bucket("ticket", 4, 0)]


def published(teller, version=None, names=None):
    number = teller.begin(version, PLAN, names)
    return teller.finish(number, PLAN, BUCKETS, Stopwatch(), 0.0)


def test_versions_count_up_from_one_or_from_the_one_that_is_named():
    teller = LoneTeller("me", 0, 1)
    assert [published(teller).version for _ in range(2)] == [1, 2]
    assert published(teller, 7).version == 7 and published(teller).version == 8
    for version in (8, 3):
        with pytest.raises(ValueError, match=f"above the last one, 8, got {version}"):
            teller.begin(version, PLAN, None)
    assert teller.begin(None, PLAN, None) == teller.begin(None, PLAN, None) == 9, "nothing was finished"


def test_a_version_is_its_publishers_with_all_that_was_put():
    update = published(LoneTeller("me", 2, 4), 5)
    assert (update.publisher, update.version, update.part, update.parts) == ("me", 5, 2, 4)
    assert update.buckets == tuple(BUCKETS) and update.bases is None
    assert update.gather_s == update.put_s == 0.0
    alone = LoneTeller("me", 0, 1)
    assert alone.abort(5, "given up"), "nobody else has what was put of it"
    assert alone.route(5) == ("", None)


def test_one_of_several_parts_is_told_its_number():
    with pytest.raises(ValueError, match="part 1 of 2 could be joined to parts of another training step"):
        LoneTeller("me", 1, 2).begin(None, PLAN, None)


def test_a_partial_version_is_added_to_those_since_which_nothing_else_changed():
    teller, a, b = LoneTeller("me", 0, 1), frozenset("a"), frozenset("b")
    with pytest.raises(ValueError, match="no version that a partial update could be added to"):
        teller.begin(None, PLAN, a)
    assert published(teller).bases is None
    assert published(teller, names=a).bases == {1}
    assert published(teller, names=a).bases == {1, 2}
    assert published(teller, names=b).bases == {3}
    assert published(teller).bases is None
    assert published(teller, names=b).bases == {5}


def test_what_was_waited_for_is_no_gathering(monkeypatch):
    watch = Stopwatch()
    monkeypatch.setattr(Stopwatch, "total", lambda _, phase: {"gather": 5.0, "put": 2.0}[phase])
    teller = LoneTeller("me", 0, 1)
    update = teller.finish(teller.begin(None, PLAN, None), PLAN, BUCKETS, watch, 1.5)
    assert (update.gather_s, update.put_s) == (3.5, 2.0)


def test_what_was_waited_for_is_no_gathering_where_a_directory_is_told_either(monkeypatch):
    watch = Stopwatch()
    monkeypatch.setattr(Stopwatch, "total", lambda _, phase: {"gather": 5.0, "put": 2.0}[phase])
    teller = DirectoryTeller(WeightDirectory.local(), InProcessByteStore(), "me", 0, 1, None)
    update = teller.finish(teller.begin(None, PLAN, None), PLAN, [], watch, 1.5)
    assert (update.gather_s, update.put_s) == (3.5, 2.0)


def test_a_directory_knows_what_is_in_a_version_whatever_was_in_the_one_before():
    directory, loaded = WeightDirectory.local(), {}
    store = InProcessByteStore()
    publisher = WeightPublisher(store, directory=directory, timeout_s=5)
    models = [{name: torch.full((2,), float(i))} for i, name in enumerate("abab")]
    for model in models:
        publisher.publish(model)
        loaded.clear()
        WeightReceiver(loaded.update, store=store, directory=directory).pull()
        assert loaded.keys() == model.keys()
        assert all(loaded[name].equal(model[name]) for name in model)


@pytest.mark.hostile
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 512])
def test_who_gives_up_and_finds_its_directory_gone_keeps_nothing_once_it_is_closed(bucket_bytes):
    directory, store = WeightDirectory.local(), InProcessByteStore()
    publisher = WeightPublisher(store, directory=directory, bucket_bytes=bucket_bytes)

    def lost():
        for i in range(4):
            yield f"w{i}", torch.full((256,), float(i))
        directory.close()

    for _ in range(3):
        with pytest.raises(DirectoryLostError):
            publisher.publish(lost())
    publisher.close()
    assert not store.held
