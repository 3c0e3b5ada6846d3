"""The process table of this machine, with processes of its own."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import eventually
from replacing import replace

from raycrew.worker_groups._on_nodes import marks as marks_module
from raycrew.worker_groups._on_nodes.lookout import Lookout
from raycrew.worker_groups._on_nodes.marks import VARIABLE, mark_own_process, marks_of
from raycrew.worker_groups._on_nodes.process_table import (
    Entry,
    Process,
    ancestors,
    clock_name,
    kill,
    memory_of,
    opened,
    own_process,
    pid_namespace,
    process_of,
    read_entry,
    read_table,
    runs,
    send,
)
from raycrew.worker_groups.testing import worker_processes


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_process_is_found_with_its_parent_and_session(child):
    entry = read_table()[child.pid]
    assert (entry.parent, entry.group, entry.session) == (os.getpid(), child.pid, child.pid)
    assert runs(entry.process)
    assert entry.process.started >= own_process().started
    assert os.getpid() in ancestors(child.pid, read_table())
    assert pid_namespace().startswith("pid:")


def test_only_the_process_that_is_meant_is_killed(child):
    process = read_entry(child.pid).process
    kill(Process(process.pid, process.started + 1))
    assert runs(process)
    kill(process)
    assert child.wait() == -signal.SIGKILL
    kill(process)


def test_without_pidfds_too(child, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    process = read_entry(child.pid).process
    assert send(process, signal.SIGCONT)
    kill(Process(process.pid, process.started + 1))
    assert runs(process)
    kill(process)
    assert child.wait() == -signal.SIGKILL


STAT = b"4242 (a ) R 9 (b) %s 11 12 13 14 15 16 17 18 19 20 500 60 7 1 25 26 %d 28 987654 30 31 32\n"


@pytest.mark.parametrize(("state", "threads", "runs"), [(b"S", 1, True), (b"Z", 1, False), (b"Z", 2, True)])
def test_an_entry_is_what_the_kernel_says_whatever_the_program_is_called(monkeypatch, state, threads, runs):
    monkeypatch.setattr(Path, "read_bytes", lambda path: STAT % (state, threads))
    entry = Entry(Process(4242, 987654), 11, 12, 13, state.decode(), 500 + 60 + 7 + 1)
    assert read_entry(4242) == (entry if runs else None)


def test_zombies_are_gone():
    child = subprocess.Popen(["true"])
    eventually(lambda: read_entry(child.pid) is None, "the child has ended, though nobody has waited for it")
    assert child.pid not in read_table()
    child.wait()


def test_a_process_lives_on_after_its_first_thread():
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(3600,)).start(); "
    code += "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        stat = f"/proc/{child.pid}/stat"
        with open(stat) as file:  # noqa: PTH123
            assert file.read()
        eventually(lambda: b") Z" in open(stat, "rb").read(), "its first thread is a zombie")  # noqa: PTH123, SIM115
        assert read_entry(child.pid) is not None
        child.kill()


def test_a_mark_is_carried_by_what_is_executed_and_by_what_is_forked():
    code = """
import os, sys, time
from raycrew.worker_groups._on_nodes.marks import mark_own_process
mark = mark_own_process()
forked = os.fork()
if forked == 0:
    time.sleep(3600)
executed = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "3600")
print(mark, forked, executed, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        mark, *pids = process.stdout.readline().split()
        try:
            for pid in map(int, pids):
                eventually(lambda pid=pid: marks_of(pid) == {mark}, "it carries the mark")
        finally:
            for pid in (*map(int, pids), process.pid):
                os.kill(pid, signal.SIGKILL)


def test_marks_add_up(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ab")
    mark = mark_own_process()
    assert os.environ[VARIABLE] == f"ab:{mark}"
    with subprocess.Popen(["sleep", "3600"]) as child:
        eventually(lambda: marks_of(child.pid) == {"ab", mark}, "the child has been executed")
        child.kill()


@pytest.mark.hostile
def test_who_can_not_be_looked_at_is_not_gone(monkeypatch):
    def read(path):
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(OSError, match="no descriptor"):
        runs(Process(os.getpid(), 1))
    with pytest.raises(OSError, match="no descriptor"):
        read_table()


@pytest.mark.hostile
def test_what_is_executed_between_two_reads_carries_its_mark(monkeypatch):
    before = {"maps": b"7f00-7f01 rw-s /memfd:raycrew-worker-ab", "environ": b"HOME=/\0"}
    after = {"maps": b"", "environ": f"HOME=/\0{VARIABLE}=ab\0".encode()}
    moments = iter([before, after])
    monkeypatch.setattr(Path, "read_bytes", lambda path: next(moments)[path.name])
    assert marks_of(1) == {"ab"}


@pytest.mark.hostile
def test_a_process_that_is_being_executed_is_looked_at_until_it_has_its_mark(monkeypatch):
    with subprocess.Popen(["sleep", "3600"]) as child:
        try:
            adopted = read_entry(child.pid)._replace(parent=1)
            answers = iter([None, None, frozenset({"ab"})])
            replace(
                monkeypatch,
                Lookout.look,
                read_table=lambda: {child.pid: adopted},
                marks_of=lambda _pid: next(answers),
                _BEING_EXECUTED_S=1.0,  # a busy machine may take the default at once
                _YOUNG_S=60.0,
            )
            seen = Lookout()
            family = seen.family(Process(1, 1), "ab")
            seen.look()
            assert family.members == {adopted.process}
        finally:
            child.kill()


def test_tests_see_what_comes_from_workers():
    """As a fork, and as what is executed in a session of its own; others are not of workers."""
    code = "from raycrew.worker_groups._on_nodes import mark_own_process as m; import os, sys; print(m()); "
    code += "sys.stdout.flush(); p = os.fork(); p or os.setsid(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        mark = worker.stdout.readline().strip()
        eventually(lambda: [*worker_processes().values()].count(frozenset({mark})) == 2, "both are seen")
        found = {pid for pid, marks in worker_processes().items() if mark in marks}
        assert worker.pid in found and os.getpid() not in found
        worker.stdin.close()
        eventually(lambda: not any(mark in marks for marks in worker_processes().values()), "both are gone")


def test_a_signal_reaches_the_process_that_is_meant_and_no_later_one(child):
    process = read_entry(child.pid).process
    assert send(process, signal.SIGSTOP)
    eventually(lambda: read_entry(child.pid).state == "T", "it is stopped")
    assert not send(Process(child.pid, process.started - 1), signal.SIGKILL), "an earlier one of its number"
    assert send(process, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not send(process, signal.SIGKILL)


@pytest.mark.hostile
def test_who_ends_before_the_signal_comes_is_gone(child, monkeypatch):
    def late(*_):
        raise ProcessLookupError

    monkeypatch.setattr(signal, "pidfd_send_signal", late)
    assert not send(read_entry(child.pid).process, signal.SIGTERM)


def test_processes_of_one_machine_call_their_clock_the_same():
    code = "from raycrew.worker_groups._on_nodes.process_table import clock_name; print(clock_name())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == clock_name()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in clock_name()


@pytest.mark.parametrize(
    ("mappings", "environment", "marks"),
    [
        ("/memfd:raycrew-worker-ab", "", {"ab"}),  # forked, and its environment is unreadable
        ("", f"HOME=/\0{VARIABLE}=cd:ef\0", {"cd", "ef"}),
        ("/lib/x", "HOME=/\0", set()),
        ("", "", None),  # it is just being executed, or is a zombie
    ],
)
def test_marks_are_in_mappings_or_the_environment(monkeypatch, tmp_path, mappings, environment, marks):
    (tmp_path / "maps").write_text(mappings)
    (tmp_path / "environ").write_text(environment)
    monkeypatch.setattr(marks_module, "Path", lambda name: tmp_path / name.rpartition("/")[2])
    assert marks_of(1) == (None if marks is None else frozenset(marks))


def test_memory_of_a_process_is_opened_by_its_name_and_no_other():
    mine, other = (os.memfd_create(f"raycrew-{name}") for name in ("mine", "other"))
    try:
        os.write(mine, b"here")
        found = opened(os.getpid(), "/memfd:raycrew-mine", os.O_RDONLY)
        try:
            assert os.pread(found, 10, 0) == b"here"
            assert not os.get_inheritable(found)
        finally:
            os.close(found)
        assert opened(os.getpid(), "/memfd:raycrew-nobodys", os.O_RDONLY) is None
    finally:
        os.close(mine)
        os.close(other)
    assert opened(os.getpid(), "/memfd:raycrew-mine", os.O_RDONLY) is None
    assert opened(2**22 + 1, "/memfd:raycrew-mine", os.O_RDONLY) is None, "there is no such process"


@pytest.mark.hostile
def test_memory_of_which_only_a_mapping_is_left_is_opened_by_who_may(monkeypatch, tmp_path):
    (tmp_path / "memory").write_bytes(b"here")

    def listed(folder):
        if folder.endswith("/fd"):
            raise PermissionError(folder)
        return ["7f00-7f01", "7f01-7f02"]

    links = {"7f00-7f01": "/lib/x", "7f01-7f02": "/memfd:raycrew-mine (deleted)"}
    real = os.open
    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(os, "readlink", lambda path: links[Path(path).name])
    monkeypatch.setattr(os, "open", lambda path, flags: real(tmp_path / "memory", flags))
    found = opened(1, "/memfd:raycrew-mine", os.O_RDONLY)
    assert found is not None
    assert os.pread(found, 10, 0) == b"here"
    os.close(found)


def test_the_memory_of_a_process_is_told_in_bytes():
    before = memory_of(os.getpid())
    assert set(before) == {"RssAnon", "VmRSS"}
    assert 0 < before["RssAnon"] <= before["VmRSS"]
    held = b"x" * (size := 64 << 20)
    more = memory_of(os.getpid())["RssAnon"] - before["RssAnon"]
    assert size // 2 < more < 2 * size and held
    assert memory_of(2**22 + 1) == {}, "there is no such process"


def test_a_kernel_that_has_one_clock_for_all_calls_it_after_its_boot(monkeypatch):
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert clock_name() != boot and clock_name().startswith(boot)

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "readlink", missing)
    assert clock_name() == boot


def test_a_process_knows_itself_as_the_table_does(child):
    assert own_process() == read_entry(os.getpid()).process == read_table()[os.getpid()].process
    assert process_of(child.pid) == read_entry(child.pid).process
    assert not runs(Process(2**22 + 1, 1)), "there is no such process"
