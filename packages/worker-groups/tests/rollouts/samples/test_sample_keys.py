"""A put that is made again, as nobody knows whether it was done, adds nothing twice."""

import pytest

from raycrew.worker_groups.errors import SampleQueueEndedError, SampleQueueTimeoutError
from raycrew.worker_groups.rollouts.samples import SampleQueue
from raycrew.worker_groups.rollouts.samples._states import Keys
from raycrew.worker_groups.rollouts.samples._storage import journal


def put(queue, *keys, **options):
    return queue.put({"tokens": [f"of {key}" for key in keys]}, version=0, keys=keys, **options)


def tokens_of(queue):
    return queue.get(100, at_least=1, timeout_s=0)["tokens"]


def test_a_put_that_is_made_again_gives_the_same_numbers_and_adds_what_is_new():
    with SampleQueue(["tokens"]) as queue:
        assert put(queue, "a", "b", lengths=[1, 1]) == [0, 1]
        assert put(queue, "a", "b", lengths=[1, 1]) == [0, 1]
        assert put(queue, "c", "b", "d", lengths=[5, 6, 7]) == [2, 1, 3]
        assert queue.put({"tokens": ["without"]}, version=0) == [4]
        batch = queue.get(5)
        assert batch["tokens"] == ["of a", "of b", "of c", "of d", "without"]
        assert [len(batch.token_versions(i)) for i in range(4)] == [1, 1, 5, 7]
        batch.done()
        assert put(queue, "d") == [3] and queue.stats().held == 0, "nor once they are gone"
        assert queue.known(["a", "x", "d"]) == ["a", "d"]


def test_what_was_put_before_needs_no_room_and_may_be_told_after_the_end():
    with SampleQueue(["tokens"], max_samples=2, max_memory=1) as queue:
        put(queue, "a")
        with pytest.raises(SampleQueueTimeoutError):
            put(queue, "a", "b", timeout_s=0)
        assert put(queue, "a", timeout_s=0) == [0]
        queue.end()
        assert put(queue, "a") == [0]
        with pytest.raises(SampleQueueEndedError):
            put(queue, "b")
        assert tokens_of(queue) == ["of a"]


def test_the_oldest_key_is_forgotten_for_a_new_one():
    with SampleQueue(["tokens"], max_keys=2) as queue:
        put(queue, "a", "b", "c")
        assert queue.known(["a", "b", "c"]) == ["b", "c"]
        assert put(queue, "a") == [3]
        assert queue.known(["a", "b", "c"]) == ["a", "c"]


def test_a_key_that_was_forgotten_takes_no_others_place_after_a_broken_off_operation(monkeypatch):
    with SampleQueue(["tokens"], max_keys=2) as queue:
        put(queue, "a", "b", "c")
        batch = queue.get(3)
        batch.done([1, 2])
        batch.give_back()
        with monkeypatch.context() as patched:
            patched.setattr(queue._channel._keeper._ledger, "put", lambda samples: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(queue, "d")
        assert queue.known(["a", "b", "c"]) == ["b", "c"]
        assert put(queue, "c") == [2] and queue.stats().held == 1


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (["a"], ValueError, "2 samples have 2 different keys"),
        (["a", "b", "c"], ValueError, "2 samples have 2 different keys"),
        (["a", "a"], ValueError, "2 samples have 2 different keys"),
        (["a", ""], TypeError, "not empty"),
        (["a", 1], TypeError, "not 1"),
        ("ab", TypeError, "a sequence of strings"),
        (7, TypeError, "a sequence of strings"),
    ],
)
def test_keys_that_are_none_are_refused_before_anything_is_put(keys, error, message):
    with SampleQueue(["tokens"]) as queue:
        with pytest.raises(error, match=message):
            queue.put({"tokens": [1, 2]}, version=0, keys=keys)
        assert queue.stats().produced == 0


@pytest.mark.parametrize("max_keys", [None, 30])
def test_a_folder_remembers_keys_though_the_files_that_they_came_in_are_gone(tmp_path, monkeypatch, max_keys):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    options = {"directory": tmp_path, "max_keys": max_keys}
    keys = [f"key {i}" for i in range(100)]
    for part in range(4):
        with SampleQueue(["tokens"], **options) as queue:
            for key in keys[25 * part : 25 * part + 25]:
                put(queue, key)
                queue.get(1).done()
    assert len(list(tmp_path.glob("*.samples"))) <= 2
    with SampleQueue(["tokens"], **options) as queue:
        assert queue.known(keys) == keys[-(max_keys or 100) :]
        assert put(queue, keys[-1]) == [99] and queue.stats().held == 0


def test_many_keys_do_not_make_a_file_of_each_record(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 2000)
    with SampleQueue(["tokens"], directory=tmp_path) as queue:
        for i in range(200):
            put(queue, f"key {i}")
        assert len(list(tmp_path.glob("*.samples"))) < 50


def test_a_put_that_was_broken_off_and_made_again_is_there_once(tmp_path, monkeypatch):
    with SampleQueue(["tokens"], directory=tmp_path) as queue:
        keeper = queue._channel._keeper
        with monkeypatch.context() as patched:
            patched.setattr(keeper._ledger, "put", lambda samples: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(queue, "a")  # written down, and nothing else
        (sample,) = put(queue, "a")
        assert put(queue, "a") == [sample]
    with SampleQueue(["tokens"], directory=tmp_path) as queue:
        assert tokens_of(queue) == ["of a"] and put(queue, "a") == [sample]


@pytest.mark.parametrize(
    ("before", "after", "held", "known"),
    [(1, 100, 3, ["a"]), (1, None, 3, ["a"]), (100, 1, 2, ["b"]), (None, 2, 2, ["a", "b"])],
)
def test_a_folder_keeps_its_samples_whatever_number_of_keys_is_remembered(
    tmp_path, before, after, held, known
):
    with SampleQueue(["tokens"], directory=tmp_path, max_keys=before) as queue:
        assert [put(queue, key) for key in "aba"] == [[0], [1], [0 if held == 2 else 2]]
    for _ in range(2):
        with SampleQueue(["tokens"], directory=tmp_path, max_keys=after) as queue:
            assert queue.stats().held == held
            assert queue.known(["a", "b"]) == known


def test_keys_are_forgotten_in_the_same_order_whoever_reopens_a_folder(tmp_path, monkeypatch):
    options = {"directory": tmp_path, "max_keys": 2}
    with SampleQueue(["tokens"], **options) as queue:
        with monkeypatch.context() as patched:
            patched.setattr(queue._channel._keeper._ledger, "put", lambda samples: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(queue, "a")  # written down, and nothing else
        assert [put(queue, key) for key in "bacb"] == [[1], [2], [3], [4]]
        assert queue.known(["a", "b", "c"]) == ["b", "c"]
    with SampleQueue(["tokens"], **options) as queue:
        assert queue.known(["a", "b", "c"]) == ["b", "c"]
        batch = queue.get(100, at_least=1, timeout_s=0)
        assert (batch.ids, batch["tokens"]) == ([1, 2, 3, 4], ["of b", "of a", "of c", "of b"])


def test_a_put_that_was_broken_off_counts_once_whoever_reopens_its_folder(tmp_path, monkeypatch):
    with SampleQueue(["tokens"], directory=tmp_path) as queue:
        with monkeypatch.context() as patched:
            patched.setattr(queue._channel._keeper._ledger, "put", lambda samples: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(queue, "a")
        put(queue, "b", "a")
        assert queue.stats().produced == 2
    with SampleQueue(["tokens"], directory=tmp_path, max_keys=1) as queue:
        stats = queue.stats()
        assert (stats.produced, stats.held, sorted(tokens_of(queue))) == (2, 2, ["of a", "of b"])


def test_the_keys_of_samples_that_are_held_are_found_again_after_a_broken_off_put(monkeypatch):
    with SampleQueue(["tokens"]) as queue:
        with monkeypatch.context() as patched:
            patched.setattr(Keys, "note", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                put(queue, "a")
        assert put(queue, "a") == [0] and tokens_of(queue) == ["of a"]
