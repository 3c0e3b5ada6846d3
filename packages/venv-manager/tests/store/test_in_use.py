"""What runs from an environment keeps it, by whatever name it was started and whoever started it."""

import json
import os
import subprocess
from contextlib import contextmanager

import pytest
from test_upkeep import forget_use, spec
from users import OTHER, as_user, give, open_folder, using

from raycrew.venv_manager import EnvironmentInUseError, Store, StoreTimeoutError, collect, ensure
from raycrew.venv_manager._waiting import slot

pytestmark = pytest.mark.hostile
__all__ = ["open_folder"]

COLLECT = """
import json
from pathlib import Path
from raycrew.venv_manager import Store, collect
store = Store(sys.argv[1])
(entry,) = store.environments()
hidden = store.users(entry.path).hidden
(row,) = collect(store, max_bytes=0, ignore_hidden=len(sys.argv) > 2)
print(json.dumps([hidden, row.reason, row.removed]))
"""


@contextmanager
def running(*command, **options):
    """A process of an interpreter that waits; gives its id."""
    words = [*map(str, command), "-c", "print(flush=True); input()"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    try:
        process.stdout.readline()  # until then Linux may show no command line of it
        yield process.pid
    finally:
        process.communicate(b"\n")


def reasons(store):
    return {row.name: row.reason for row in collect(store, max_bytes=0)}


def test_what_was_started_by_a_readable_name_keeps_its_environment(fake_store):
    built = ensure(spec("one"), store=fake_store)
    fake_store.name("worker", built.key)
    forget_use(fake_store)
    with running(fake_store.root / "by-name" / "worker" / "bin" / "python") as pid:
        assert str(pid) in reasons(fake_store)[built.key]
        with pytest.raises(EnvironmentInUseError, match=str(pid)):
            ensure(spec("one"), store=fake_store, force_rebuild=True)
    assert built.python.exists()


def test_a_name_that_changed_since_keeps_what_it_may_have_named(fake_store):
    one, other = (ensure(spec(name), store=fake_store) for name in ("one", "other"))
    fake_store.name("worker", one.key)
    forget_use(fake_store)
    with running(fake_store.root / "by-name" / "worker" / "bin" / "python") as pid:
        fake_store.name("worker", other.key)
        found = reasons(fake_store)
        assert all(str(pid) in found[e.key] for e in (one, other))
        (fake_store.root / "by-name" / "worker").unlink()
        assert str(pid) in reasons(fake_store)[one.key]
    assert len(fake_store.environments()) == 2


@pytest.mark.parametrize(
    "way", ["a link elsewhere", "from within", "relative", "works there", "store by link"]
)
def test_other_ways_to_run_from_an_environment(fake_store, tmp_path, way):
    built = ensure(spec("one"), store=fake_store)
    forget_use(fake_store)
    link = tmp_path / "link"
    link.symlink_to(built.path / "venv")
    ways = {
        "a link elsewhere": (link / "bin" / "python", None),
        "from within": ("bin/python", link),
        "relative": ("link/bin/python", tmp_path),
        "works there": (os.path.realpath(built.python), built.path),
        "store by link": (built.python, None),
    }
    command, folder = ways[way]
    if way == "store by link":
        (tmp_path / "to-store").symlink_to(fake_store.root)
        fake_store = Store(tmp_path / "to-store", environ=fake_store.environ)
    with running(command, cwd=folder) as pid:
        assert str(pid) in reasons(fake_store)[built.key]
    assert built.python.exists()


@pytest.mark.root
def test_a_process_that_may_not_be_looked_into_counts_as_a_user(fake_store, open_folder):
    store = Store(open_folder / "store", environ=fake_store.environ)
    built = ensure(spec("one"), store=store)
    forget_use(store)
    give(store.root, OTHER)
    with running("of.Title", executable=built.python) as pid:  # by root, as it titles itself

        def collected(*flags):
            return json.loads(as_user(OTHER, COLLECT, store.environ, store.root, *flags))

        hidden, reason, removed = collected()
        assert (pid in hidden, "may not look into" in reason, removed) == (True, True, False)
        assert collected("ignore-hidden")[2]
    assert not built.python.exists()


def test_what_does_not_run_from_it_does_not_keep_it(fake_store):
    one, other = (ensure(spec(name), store=fake_store) for name in ("one", "other"))
    fake_store.name("worker", other.key)
    forget_use(fake_store)
    link = fake_store.root / "by-name" / "worker"
    os.utime(link, (1e9, 1e9), follow_symlinks=False)
    with running(link / "bin" / "python") as pid:
        found = reasons(fake_store)
    assert str(pid) in found[other.key]
    assert not one.python.exists()


USE = """
from raycrew.venv_manager import Store
assert Store(sys.argv[1]).locks(sys.argv[2]).use()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_who_may_only_read_a_store_keeps_what_it_uses_from_those_who_may_write(fake_store, open_folder):
    """Also from another machine, whose processes nobody sees here."""
    store = Store(open_folder / "store", environ=fake_store.environ)
    built = ensure(spec("one"), store=store)
    forget_use(store)
    with using(OTHER, USE, store.environ, store.root, built.key), store.locks(built.key).unused() as free:
        assert not free
    with store.locks(built.key).unused() as free:
        assert free


def test_a_refused_rebuild_leaves_its_caller_a_user(fake_store):
    built = ensure(spec("one"), store=fake_store)
    with running(built.python), pytest.raises(EnvironmentInUseError, match="in use"):
        ensure(spec("one"), store=fake_store, force_rebuild=True)
    (kept,) = collect(fake_store, max_bytes=0)
    assert (kept.reason, kept.removed) == ("in use by a process that asked for it", False)
    impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=0.1, max_builds=1)
    locks, recipe = fake_store.locks(built.key), fake_store.recipe(built.key)
    with slot(locks.folder, 1, 1.0), pytest.raises(StoreTimeoutError):
        impatient.install(built.key, lambda: recipe, force=True)
    assert not collect(fake_store, max_bytes=0)[0].removed
