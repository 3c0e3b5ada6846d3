"""Locks and forks: what a process holds is its own, whatever was forked from it meanwhile."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from builds import SPEC, child_environment, wait_until

from raycrew.venv_manager import Store, ensure
from raycrew.venv_manager._waiting import slot

pytestmark = pytest.mark.hostile

BUILDING = """
import os, sys, threading, time
from raycrew.venv_manager import EnvironmentSpec, ensure
spec = EnvironmentSpec.requirements(["fake"], carry=False)
threading.Thread(target=ensure, args=(spec,)).start()
sys.stdin.readline()
if (child := os.fork()) == 0:
    print(os.getpid(), flush=True)
    time.sleep(3600)
"""


@contextlib.contextmanager
def forked():
    """A process that is forked from this one, and lives until the end."""
    if (child := os.fork()) == 0:
        signal.pause()
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("step", ["pip compile", "venv", "pip install"])
def test_what_a_killed_builder_has_forked_locks_nobody_out(fake_store, fake_uv, step):
    fake_uv.hold(step)
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDING], env=child_environment(fake_store), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    child = None
    try:
        wait_until(lambda: fake_uv.calls(step))
        builder.stdin.write("\n")
        builder.stdin.flush()
        child = int(builder.stdout.readline())
        builder.kill()
        builder.wait()
        fake_uv.release(step)
        waiting = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=30)
        assert ensure(SPEC, store=waiting).python.exists()
    finally:
        fake_uv.release(step)
        builder.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)
        builder.communicate()


def test_a_fork_during_a_rebuild_does_not_keep_the_environment_from_being_used(fake_store):
    fake_store.need_writable("abc")
    locks = fake_store.locks("abc")
    with contextlib.ExitStack() as later:
        with locks.building(1.0), locks.unused() as free, slot(locks.folder, 1, 1.0):
            assert free
            later.enter_context(forked())
        assert locks.use()
        locks.release()
        with locks.building(1.0) as held, slot(locks.folder, 1, 1.0):
            assert held is not None


def test_a_use_ends_for_its_process_and_stays_for_what_was_forked_from_it(fake_store):
    fake_store.need_writable("abc")
    locks = fake_store.locks("abc")
    assert locks.use()
    with forked():
        locks.release()
        with locks.unused() as free:
            assert not free
    with locks.unused() as free:
        assert free


def test_a_fork_is_no_new_use(fake_store):
    fake_store.need_writable("abc")
    locks = fake_store.locks("abc")
    assert locks.use()
    os.utime(locks.folder / "abc.used", (1e9, 1e9))
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert locks.last_used() == 1e9
    locks.release()


UNWINDING = """
import os, sys
from pathlib import Path
from raycrew.venv_manager._waiting import KeyLocks
ours, others = (KeyLocks(Path(sys.argv[1]), "abc") for _ in range(2))
with ours.building(1.0), ours.unused():
    if os.fork() == 0:
        sys.exit()  # through these very blocks
    os.wait()
    print(others.use())
    try:
        with others.building(0.0):
            print("locked twice")
    except TimeoutError:
        print("held")
"""


def test_what_unwinds_in_a_forked_process_lets_go_of_nothing_of_its_parents(tmp_path):
    said = subprocess.check_output([sys.executable, "-c", UNWINDING, tmp_path], text=True, timeout=60)
    assert said.split() == ["False", "held"]


FORKING = """
import os, sys, threading
from pathlib import Path
from raycrew.venv_manager._waiting import KeyLocks

locks, goes_on = KeyLocks(Path(sys.argv[1]), "abc"), True

def lock():
    while goes_on:
        with locks.unused():
            pass

def use():
    while goes_on:
        locks.use()
        locks.release()

def kept():
    locks.release()  # what is forked uses what its parent used
    links = Path("/proc/self/fd").iterdir()
    return any(os.readlink(link).endswith("abc.used") for link in links if link.is_symlink())

thread = threading.Thread(target=globals()[sys.argv[2]])
thread.start()
ends = []
for _ in range(40):
    if (child := os.fork()) == 0:
        os._exit(kept())
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
goes_on = False
thread.join()
print(sum(ends))
"""


@pytest.mark.parametrize("way", ["lock", "use"])
def test_what_is_forked_by_another_thread_at_any_moment_keeps_no_lock_file_open(tmp_path, way):
    said = subprocess.check_output([sys.executable, "-c", FORKING, tmp_path, way], text=True, timeout=60)
    assert said.split() == ["0"]
