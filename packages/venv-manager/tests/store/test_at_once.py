"""What several processes do to a store at once."""

import os
import shutil
import time

import pytest

from raycrew.venv_manager import SpecError, Store, collect, ensure
from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store import building, records, upkeep
from raycrew.venv_manager._waiting import locks

pytestmark = pytest.mark.hostile

SPEC = EnvironmentSpec.requirements(["fake"], carry=False)


def left_over(store):
    """What an interrupted removal left, with something in it."""
    folder = store.root / "trash" / f"{'0' * 24}-deadbeef" / "venv"
    folder.mkdir(parents=True)
    (folder / "file").write_text("x")
    return folder.parent


def record(store):
    """A choice of versions that nobody has asked for in years."""
    file = store.root / "choices" / "old.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    os.utime(file, (0, 0))
    return file


def test_what_another_one_takes_away_meanwhile_is_in_nobodys_way(fake_store, monkeypatch):
    fake_store.need_writable("any")
    folder, file = left_over(fake_store), record(fake_store)

    def take(root):
        shutil.rmtree(root)
        return building.take(root)

    def size_of(path):
        path.unlink()
        return records.size_of(path)

    monkeypatch.setattr(upkeep, "building", type("Building", (), {"take": staticmethod(take)}))
    others = {"unused_since": staticmethod(records.unused_since), "size_of": staticmethod(size_of)}
    monkeypatch.setattr(upkeep, "records", type("Records", (), others))
    assert collect(fake_store, older_than_days=1) == []
    assert not folder.exists() and not file.exists()


def test_a_record_that_goes_as_it_is_looked_at_is_left_out(fake_store, monkeypatch):
    fake_store.need_writable("any")
    file, is_symlink = record(fake_store), type(fake_store.root).is_symlink

    def gone(path):
        path.unlink()
        return is_symlink(path)

    monkeypatch.setattr(type(file), "is_symlink", gone)
    assert list(records.unused_since(fake_store, 1)) == []


def test_an_environment_that_another_one_removed_is_not_told_of_as_removed_twice(fake_store, monkeypatch):
    environment = ensure(SPEC, store=fake_store)
    fake_store.locks(environment.key).release()
    used_by = upkeep._used_by

    def removed_meanwhile(store, key, *others):
        store.remove_folder(store.root / key)
        return used_by(store, key, *others)

    monkeypatch.setattr(upkeep, "_used_by", removed_meanwhile)
    (removal,) = collect(fake_store, max_bytes=0)
    assert (removal.removed, removal.freed_bytes) == (False, 0)
    assert removal.reason == "removed by another process"


@pytest.mark.parametrize(
    "wrong",
    [
        {"older_than_days": -1},
        {"older_than_days": float("nan")},
        {"max_bytes": -1},
        {"max_bytes": float("nan")},
    ],
)
def test_nothing_is_removed_by_a_number_that_is_none(fake_store, wrong):
    ensure(SPEC, store=fake_store)
    with pytest.raises(SpecError, match="is no number of"):
        collect(fake_store, **wrong)
    assert len(fake_store.environments()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"build_timeout_s": float("nan")},
        {"build_timeout_s": -1},
        {"max_builds": 0},
        {"max_builds": float("nan")},
    ],
)
def test_a_store_in_which_somebody_would_wait_for_ever_is_refused(tmp_path, wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        Store(tmp_path, **wrong)


def test_a_forked_process_does_not_wait_for_threads_that_there_are_not(fake_store):
    environment = ensure(SPEC, store=fake_store)
    fake_store.locks(environment.key).release()
    with locks._guard.here:  # as another thread may have it
        pid = os.fork()
        if pid == 0:
            os._exit(0 if fake_store.locks(environment.key).use() else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert done == (pid, 0)
