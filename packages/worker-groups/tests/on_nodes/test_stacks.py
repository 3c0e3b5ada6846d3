"""The stacks of a process, whatever it is at."""

import asyncio
import os
import secrets
import select
import signal
import subprocess
import sys

import pytest
from patience import PATIENCE_S, eventually

from raycrew.worker_groups._on_nodes import stacks
from raycrew.worker_groups._on_nodes.process_table import Process, read_entry
from raycrew.worker_groups._on_nodes.watch import Watch

PROGRAM = """
import ctypes, os, sys, threading, time
from raycrew.worker_groups._on_nodes.stacks import offer_stacks

there = threading.Event()

def waits_in_a_thread():
    there.set()
    time.sleep(3600)

def holds_the_lock():
    print("here", flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

def sleeps():
    print("here", flush=True)
    time.sleep(3600)

threading.Thread(target=waits_in_a_thread, daemon=True).start()
if sys.argv[1]:
    offer_stacks(sys.argv[1])
there.wait()
{"lock": holds_the_lock, "sleep": sleeps}[sys.argv[2]]()
"""
MARK = secrets.token_hex(16)


@pytest.fixture
def process(request):
    mark, what = request.param
    with subprocess.Popen([sys.executable, "-c", PROGRAM, mark, what], stdout=subprocess.PIPE) as started:
        ready, _, _ = select.select([started.stdout], [], [], PATIENCE_S)
        try:
            assert ready, "it says nothing"
            started.stdout.readline()
            yield read_entry(started.pid).process
        finally:
            started.kill()


def taken(process, mark=MARK, timeout_s=PATIENCE_S):
    return asyncio.run(stacks.stacks_of(process, mark, timeout_s))


@pytest.fixture
def without_py_spy(monkeypatch):
    async def absent(*_):
        return ""

    monkeypatch.setattr(stacks, "_asked_of_py_spy", absent)


@pytest.mark.parametrize(
    ("process", "name"),
    [((MARK, "sleep"), "sleeps"), ((MARK, "lock"), "holds_the_lock")],
    indirect=["process"],
)
def test_all_threads_are_told_again_and_again(process, name, without_py_spy):
    eventually(lambda: name in taken(process)[0], "the main thread has come there")
    for _ in range(3):
        text, told_by = taken(process)
        assert told_by == "faulthandler"
        assert text.count("waits_in_a_thread") == 1 and text.count(f"in {name}") == 1


@pytest.mark.hostile
@pytest.mark.parametrize("process", [("", "sleep"), (MARK, "sleep")], indirect=True)
def test_who_does_not_offer_them_is_not_sent_a_signal(process, without_py_spy):
    text, told_by = taken(process, "another")
    assert (told_by, "does not offer" in text) == ("", True)
    assert read_entry(process.pid).process == process


@pytest.mark.hostile
@pytest.mark.parametrize("process", [(MARK, "sleep")], indirect=True)
def test_who_is_stopped_or_gone_is_told_of(process, without_py_spy):
    other = Process(process.pid, process.started + 1)
    assert taken(other) == ("its process has ended", "")
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: read_entry(process.pid).state == "T", "it has stopped")
    assert taken(process) == ("its process is stopped, and py-spy is not there or may not look", "")
    os.kill(process.pid, signal.SIGCONT)
    assert taken(process)[1] == "faulthandler"


@pytest.mark.parametrize("process", [(MARK, "sleep")], indirect=True)
@pytest.mark.parametrize(
    ("script", "told_by"),
    [("echo MainThread of $4 $2", "py-spy"), ("exit 1", "faulthandler"), ("exec sleep 3600", "faulthandler")],
)
def test_py_spy_is_asked_first(process, script, told_by, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\n{script}\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(stacks, "_PY_SPY_S", 5.0 if told_by == "py-spy" else 0.5)
    text, by = taken(process)
    assert by == told_by
    # Never stopped by it, and so never left stopped.
    assert (f"MainThread of {process.pid} --nonblocking" in text) is (by == "py-spy")


@pytest.mark.hostile
@pytest.mark.parametrize("process", [(MARK, "sleep")], indirect=True)
def test_py_spy_tells_of_who_is_stopped_and_leaves_it_so(process):
    if stacks._py_spy() is None:
        pytest.skip("py-spy is not installed")
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: read_entry(process.pid).state == "T", "it has stopped")
    text, told_by = taken(process)
    assert (told_by, "sleeps" in text, "waits_in_a_thread" in text) == ("py-spy", True, True)
    assert read_entry(process.pid).state == "T"


@pytest.mark.hostile
@pytest.mark.parametrize("process", [(MARK, "sleep")], indirect=True)
def test_who_asks_at_the_same_time_gets_each_its_own(process, without_py_spy):
    eventually(lambda: "sleeps" in taken(process)[0], "the main thread has come there")

    async def all_at_once():
        return await asyncio.gather(*(stacks.stacks_of(process, MARK, PATIENCE_S) for _ in range(3)))

    for text, told_by in asyncio.run(all_at_once()):
        assert (told_by, text.count("in sleeps"), text.count("in waits_in_a_thread")) == (
            "faulthandler",
            1,
            1,
        )


@pytest.mark.hostile
@pytest.mark.parametrize("process", [(MARK, "sleep")], indirect=True)
def test_a_sandbox_does_not_make_the_living_dead(process, without_py_spy, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert taken(process)[1] == "faulthandler"

    def forbidden(*_):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "kill", forbidden)
    assert taken(process) == ("it can't be sent a signal: not here", "")


@pytest.mark.hostile
def test_one_worker_does_not_hide_the_others_of_its_node(monkeypatch):
    async def told(process, mark, timeout_s):
        if process.pid == 1:
            raise OSError("no descriptor left")
        return "its stacks", "py-spy"

    # Not the module's: who has unpickled the class here has given its methods globals of their own.
    monkeypatch.setitem(Watch.stacks.__globals__, "stacks_of", told)
    here = Watch()
    for pid in (1, 2):
        here._lookout.family(Process(pid, 5), MARK)
    (problem, nothing), other, unknown = asyncio.run(here.stacks([(1, 5), (2, 5), (3, 5)], 1.0))
    assert "no descriptor left" in problem and nothing == ""
    assert (other, unknown) == (("its stacks", "py-spy"), None)
