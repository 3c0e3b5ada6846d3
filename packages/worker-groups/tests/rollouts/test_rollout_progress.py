"""What a collection has done outlives it in a folder, for the same collection alone."""

import json

import pytest

from raycrew.worker_groups.rollouts import RolloutFileError
from raycrew.worker_groups.rollouts._delivery.progress import Done, Progress, done_in
from raycrew.worker_groups.rollouts._values import Outcome

OPTIONS = {"rollout": "agents.rollout", "samples_per_prompt": 2}


def done_of(name):
    return Done(name, b"prompt", [Outcome(b"data", "1"), Outcome(kind="late", message="slow")], [0, 2])


def taken(progress):
    found = []
    while len(progress) and (batch := progress.take()) is not None:
        found.append(done_in(batch).id)
        batch.done()
    return found


@pytest.mark.parametrize("fsync", [False, True])
def test_what_was_not_taken_comes_first_and_nothing_twice(tmp_path, fsync):
    first = Progress(tmp_path / "run", OPTIONS, fsync=fsync)
    for name in ("a", "b", "c"):
        first.add(done_of(name))
    first.take().done()
    batch = first.take()  # and is never heard of again
    assert done_in(batch) == done_of("b")
    first.close()
    second = Progress(tmp_path / "run", OPTIONS, fsync=fsync)
    assert second.run == first.run and len(second) == 2
    assert [second.has(name) for name in ("a", "b", "c", "d")] == [True, True, True, False]
    second.add(done_of("a"))
    assert taken(second) == ["b", "c"]
    second.end()
    assert second.take() is None
    second.close()
    third = Progress(tmp_path / "run", OPTIONS)
    assert len(third) == 0 and third.has("c")
    third.close()


def test_without_a_folder_nothing_is_left():
    first, second = Progress(None, OPTIONS), Progress(None, OPTIONS)
    first.add(done_of("a"))
    assert first.run != second.run and not second.has("a")


def test_a_folder_is_one_collections_at_a_time_and_of_one_kind(tmp_path):
    first = Progress(tmp_path, OPTIONS)
    with pytest.raises(RolloutFileError, match="in use"):
        Progress(tmp_path, OPTIONS)
    first.close()
    with pytest.raises(RolloutFileError, match="its samples_per_prompt is 2, not 3"):
        Progress(tmp_path, {**OPTIONS, "samples_per_prompt": 3})
    for text in ("{", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "run": "r", "options": 7}'):
        (tmp_path / "collection.json").write_text(text)
        with pytest.raises(RolloutFileError, match=r"damaged|another version"):
            Progress(tmp_path, OPTIONS)
    (tmp_path / "collection.json").write_text(json.dumps({"format": 1, "run": "r", "options": OPTIONS}))
    Progress(tmp_path, OPTIONS).close()


def test_what_is_done_without_a_word_of_what_it_is_of_is_refused(tmp_path):
    first = Progress(tmp_path, OPTIONS)
    first.add(done_of("a"))
    first.close()
    (tmp_path / "collection.json").unlink()
    with pytest.raises(RolloutFileError, match="is missing"):
        Progress(tmp_path, OPTIONS)


def test_a_disk_that_is_full_is_told_of(tmp_path, monkeypatch):
    progress = Progress(tmp_path, OPTIONS)
    progress.add(done_of("a"))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", full)
        with pytest.raises(RolloutFileError, match="No space left"):
            progress.add(done_of("b"))
    later = Progress(tmp_path, OPTIONS)
    assert later.has("a") and not later.has("b")
    later.close()
