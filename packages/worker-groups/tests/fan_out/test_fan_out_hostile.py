"""Items that want `fan_out` to fail: wrong values, hangs and processes left behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from patience import PATIENCE_S, eventually, is_running, read_pids, within

from raycrew.worker_groups import (
    ItemCrashedError,
    ItemError,
    ItemTimeoutError,
    close_fan_out,
    fan_out,
)

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("local_ray", "warm_pool")]


def fork_and_return(item):
    """Both processes return, the child something else."""
    return item if os.fork() else -item


def fork_and_raise(item):
    if os.fork() == 0:
        raise ValueError("the child")
    return item


def fork_and_exit(item):
    if os.fork() == 0:
        sys.exit(3)
    return item


class ForksInPickle:
    """Forks while its result is pickled, and both go on."""

    def __init__(self, item):
        self.item = item

    def __reduce__(self):
        return int, (self.item if os.fork() else -self.item,)


def fork_in_thread(item):
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()
    return item


@pytest.mark.parametrize(
    "fn", [fork_and_return, fork_and_raise, fork_and_exit, ForksInPickle, fork_in_thread]
)
def test_a_child_that_returns_gives_no_item_a_value(fn):
    assert fan_out(fn, range(1, 61), batch_size=10) == list(range(1, 61))
    assert fan_out(lambda item: item * 2, range(100)) == list(range(0, 200, 2))


def test_a_child_that_returns_after_its_item_has_no_part_in_the_next_call(tmp_path):
    def linger(item):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / str(os.getpid())).touch()
            time.sleep(0.5)
            return "the child's"
        return item

    assert fan_out(linger, range(16)) == list(range(16))
    assert fan_out(abs, range(-500, 0)) == list(range(500, 0, -1))
    eventually(lambda: not any(map(is_running, read_pids(tmp_path))), "the children are gone")


def close_everything(item):
    os.closerange(0, 256)
    return item


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.long), 5])
def test_an_item_that_closes_its_descriptors_and_hangs_ends_at_its_deadline(tmp_path, batch_size):
    def deaf(item):
        if item == 3:
            (tmp_path / str(os.getpid())).touch()
            close_everything(item)
            signal.pause()
        return item

    with within(60):
        results = fan_out(deaf, range(10), batch_size=batch_size, timeout_s=3, on_error="return")
    assert isinstance(results[3], ItemTimeoutError)
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]
    eventually(lambda: not any(map(is_running, read_pids(tmp_path))), "the deaf process is gone")
    assert fan_out(abs, range(-20, 0)) == list(range(20, 0, -1))


def test_an_item_that_closes_its_descriptors_and_returns_is_the_only_one_to_fail():
    def deaf(item):
        return close_everything(item) if item == 3 else item

    results = fan_out(deaf, range(10), batch_size=5, on_error="return")
    assert isinstance(results[3], ItemCrashedError)
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]


def test_sockets_that_an_item_closes_and_opens_again_reach_no_result(tmp_path):
    def reopen(item):
        if item == 3:
            os.closerange(3, 256)
            for n in range(200):
                os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT)
        return item

    results = fan_out(reopen, range(10), batch_size=5, on_error="return")
    assert isinstance(results[3], ItemCrashedError)
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 200, "they are the item's"


def strangers_in(journal_only):
    """Sends and writes what is not its own, through every descriptor it has."""

    def forge(item):
        if item == 3:
            for fd in range(3, 64):
                with contextlib.suppress(OSError):
                    name = str(pathlib.Path(f"/proc/self/fd/{fd}").readlink())
                    if "raycrew-journal" in name:
                        size = os.fstat(fd).st_size
                        os.pwrite(fd, os.pread(fd, size, 0)[: size // 2] + b"\1" * 64, size - 16)
                    elif not journal_only and "socket" in name:
                        os.write(fd, b"D" + bytes(range(64)))
        return item

    return forge


@pytest.mark.parametrize("journal_only", [True, False])
def test_what_does_not_fit_ends_the_process_and_reaches_no_result(journal_only):
    results = fan_out(strangers_in(journal_only), range(10), batch_size=5, on_error="return")
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]
    assert isinstance(results[3], ItemError) or results[3] == 3
    assert fan_out(abs, range(-20, 0)) == list(range(20, 0, -1))


def test_a_stopped_process_ends_at_its_deadline():
    def stop(item):
        if item == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return item

    results = fan_out(stop, range(10), batch_size=5, timeout_s=3, on_error="return")
    assert isinstance(results[3], ItemTimeoutError)
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    "what", [SystemExit(0), SystemExit("no"), KeyboardInterrupt(), GeneratorExit(), Odd("odd")]
)
def test_whatever_an_item_raises_is_its_own_error(what):
    def leave(item):
        if item == 3:
            raise what
        return item

    results = fan_out(leave, range(10), batch_size=5, on_error="return")
    assert isinstance(results[3], ItemError)
    assert type(what).__qualname__ in str(results[3])
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]


@pytest.mark.parametrize("code", [0, 7])
def test_an_item_that_exits_at_once_fails_alone(code):
    def leave(item):
        if item == 3:
            os._exit(code)
        return item

    results = fan_out(leave, range(10), batch_size=5, on_error="return")
    assert isinstance(results[3], ItemCrashedError)
    assert f"exited with code {code}" in str(results[3])
    assert results[:3] + results[4:] == [0, 1, 2, *range(4, 10)]


def start_outsiders(folder):
    """Starts a child, a grandchild and a daemon, each in a session of its own, and forgets them."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    script = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    made = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            while True:
                signal.pause()
        os._exit(0)
    daemon = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    for pid in (child.pid, int(made.stdout), daemon):
        (folder / str(pid)).touch()


def test_what_an_item_started_ends_with_it(tmp_path):
    def start(item):
        start_outsiders(tmp_path)
        return item

    def living(folder):
        return [pid for pid in read_pids(folder) if is_running(pid)]

    def look(item):
        start_outsiders(tmp_path / str(item))
        return item

    assert fan_out(start, range(4)) == list(range(4))
    assert len(read_pids(tmp_path)) == 12
    eventually(lambda: not living(tmp_path), "what the items started is gone")


def test_the_next_item_of_a_batch_finds_nothing_of_the_one_before(tmp_path):
    def look(item):
        before = [child.pid for child in psutil.Process().children(recursive=True)]
        start_outsiders(tmp_path)
        return before

    assert fan_out(look, range(6), batch_size=6) == [[]] * 6


def test_a_working_directory_is_put_back(tmp_path):
    def wander(item):
        before = str(pathlib.Path.cwd())
        if item % 3 == 1:
            os.chdir(tmp_path)
        if item % 3 == 2:
            (tmp_path / f"{item}").mkdir()
            os.chdir(tmp_path / f"{item}")
            (tmp_path / f"{item}").rmdir()
        return before

    assert len(set(fan_out(wander, range(30), max_workers=1, batch_size=5))) == 1


DRIVER = """
import os, pathlib, signal, sys, ray
from raycrew.worker_groups import close_fan_out, fan_out
sys.path.insert(0, sys.argv[4])
import test_fan_out_hostile as hostile
folder = pathlib.Path(sys.argv[2])
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

def begin():
    hostile.start_outsiders(folder)

def note(item):
    hostile.start_outsiders(folder)
    (folder / str(os.getpid())).touch()
    if item == 0:
        (folder.parent / "started").touch()
        signal.pause()

from raycrew.worker_groups import fan_out_as_completed
outcomes = fan_out_as_completed(note, range(4), batch_size=1)
next(outcomes)
while not (folder.parent / "started").exists():
    pass
if sys.argv[3] == "close":
    close_fan_out()
    import psutil
    left = [p.name for p in folder.iterdir() if psutil.pid_exists(int(p.name))
            and psutil.Process(int(p.name)).status() != psutil.STATUS_ZOMBIE]
    assert not left, left
if sys.argv[3] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("exits", marks=pytest.mark.long),
        "killed",
        pytest.param("close", marks=pytest.mark.long),
    ],
)
def test_what_items_started_ends_with_the_driver(local_ray, tmp_path, how):
    folder = tmp_path / "pids"
    folder.mkdir()
    arguments = [local_ray, str(folder), how, str(pathlib.Path(__file__).parent)]
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert run.returncode == (-signal.SIGKILL if how == "killed" else 0), run.stderr
    pids = read_pids(folder)
    assert len(pids) >= 4
    eventually(lambda: not any(map(is_running, pids)), "everything that items started is gone")


def test_what_items_started_ends_with_their_fork_server(tmp_path):
    def kill_server(item):
        start_outsiders(tmp_path)
        if item == 3 and not (tmp_path.parent / "killed").exists():
            (tmp_path.parent / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return item

    assert fan_out(kill_server, range(6), batch_size=1) == list(range(6))
    eventually(lambda: not any(map(is_running, read_pids(tmp_path))), "what the items started is gone")
    close_fan_out()
