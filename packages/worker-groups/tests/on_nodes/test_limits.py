"""Limits of private memory, kept in processes of their own."""

import asyncio
import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time

import pytest
from patience import PATIENCE_S
from replacing import replace

from raycrew.worker_groups._on_nodes import read_tail
from raycrew.worker_groups._on_nodes.limits import MemoryLimits
from raycrew.worker_groups._on_nodes.process_table import (
    Process,
    memory_of,
    own_process,
    pid_namespace,
    read_entry,
)
from raycrew.worker_groups._on_nodes.sight import Sights
from raycrew.worker_groups._on_nodes.watch import Watch


@contextlib.contextmanager
def sleeping():
    with subprocess.Popen(["sleep", "3600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def child():
    with sleeping() as process:
        yield process


@pytest.fixture
def other():
    with sleeping() as process:
        yield process


@pytest.fixture
def ended(monkeypatch):
    """Whom limits end, who is left alive: also where the one at hand is this process."""
    ended = []
    replace(monkeypatch, MemoryLimits._enforce, kill=ended.append)
    return ended


def test_who_has_more_is_ended_and_the_others_are_not(child):
    worker, kept = read_entry(child.pid).process, MemoryLimits()
    kept.set(worker, 2**40)
    kept.enforce()
    assert (child.poll(), kept.exceeded, kept.are_set) == (None, {}, True)
    kept.set(worker, 1)
    kept.enforce()
    assert child.wait() == -signal.SIGKILL
    assert 0 < kept.exceeded[worker] == kept.exceeded[worker] // 1024 * 1024
    kept.enforce()
    assert not kept.are_set
    kept.set(worker, 1)
    assert not kept.are_set, "it has ended"


def test_who_is_ended_has_it_in_its_output(tmp_path):
    """Another watch, or a keeper's, may be asked why it died."""
    with (tmp_path / "err").open("w") as errors, subprocess.Popen(["sleep", "3600"], stderr=errors) as child:
        errors.write("half a line")
        errors.flush()
        worker, kept = read_entry(child.pid).process, MemoryLimits()
        kept.set(worker, 1)
        kept.enforce()
    assert read_tail([str(tmp_path / "err")]).splitlines() == [
        "half a line",
        f"ended for its memory: it has {kept.exceeded[worker]} bytes of its own, and 1 is the limit",
    ]


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["closed", "a pipe that is full", "a pipe that nobody reads"])
def test_who_has_nowhere_to_write_to_is_ended_all_the_same(kind):
    theirs, ours = os.pipe()
    if kind == "closed":
        command = ["sh", "-c", "echo; exec sleep 3600 2>&-"]
    else:
        command = ["sh", "-c", "echo; exec sleep 3600"]
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            while kind == "a pipe that is full":
                os.write(ours, bytes(1 << 16))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=ours) as child:
        os.close(ours)
        if kind == "a pipe that nobody reads":
            os.close(theirs)
        child.stdout.readline()
        kept = MemoryLimits()
        kept.set(read_entry(child.pid).process, 1)
        kept.enforce()
        assert child.wait() == -signal.SIGKILL
    if kind != "a pipe that nobody reads":
        os.close(theirs)


@pytest.mark.hostile
def test_a_later_process_of_the_same_number_is_left_alone(child):
    worker, kept = read_entry(child.pid).process, MemoryLimits()
    kept.set(Process(worker.pid, worker.started + 1), 1)
    kept.enforce()
    assert (child.poll(), kept.exceeded, kept.are_set) == (None, {}, False)


@pytest.mark.hostile
def test_a_name_that_is_cut_within_a_letter_is_no_trouble():
    program = "open('/proc/self/comm', 'w').write('x' * 14 + chr(233)); print('named', flush=True); input()"
    command = [sys.executable, "-X", "utf8", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout.readline() == b"named\n"
        kept = MemoryLimits()
        kept.set(read_entry(named.pid).process, 1)
        kept.enforce()
        assert named.wait() == -signal.SIGKILL


@pytest.mark.hostile
def test_a_worker_that_can_not_be_looked_at_costs_only_itself(child, other, monkeypatch, caplog):
    def read(pid):
        if pid == other.pid:
            raise RuntimeError("no luck")
        return {"RssAnon": 2}

    replace(monkeypatch, MemoryLimits._enforce, memory_of=read)
    unseen, kept = read_entry(other.pid).process, MemoryLimits()
    kept.set(unseen, 1)
    kept.set(read_entry(child.pid).process, 1)
    kept.enforce()
    kept.enforce()
    assert child.wait() == -signal.SIGKILL
    assert other.poll() is None
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]

    replace(monkeypatch, Sights.of, memory_of=read)
    told = [(*unseen, "0" * 32, namespace, 0) for namespace in (pid_namespace(), "elsewhere")]
    first, second = asyncio.run(Watch().see(told, 1.0))
    assert "RuntimeError: no luck" in first
    assert "namespace" in second


@pytest.mark.hostile
def test_a_new_watch_keeps_the_limits_of_whom_it_is_asked_about(child):
    """As when the one before it was killed."""
    told = (*read_entry(child.pid).process, "0" * 32, pid_namespace(), 1)

    async def see():
        await Watch().see([told], 1.0)
        due = time.monotonic() + PATIENCE_S
        while child.poll() is None and time.monotonic() < due:
            await asyncio.sleep(0.05)

    asyncio.run(see())
    assert child.poll() is not None, "it goes on"
    assert child.wait() == -signal.SIGKILL


def test_no_limit_is_none():
    kept = MemoryLimits()
    kept.set(own_process(), 0)
    assert not kept.are_set
    assert kept.of(own_process()) == 0
    kept.set(own_process(), 2**40)
    assert (kept.are_set, kept.of(own_process())) == (True, 2**40)


def test_shared_memory_is_nobodys(ended):
    size, before = 64 * 2**20, memory_of(os.getpid())["RssAnon"]
    with mmap.mmap(-1, size) as shared:
        for _ in range(size // 2**20):
            shared.write(b"x" * 2**20)
        assert memory_of(os.getpid())["RssAnon"] < before + size // 2
        kept = MemoryLimits()
        kept.set(own_process(), before + size // 2)
        kept.enforce()
        assert ended == []


def test_what_can_not_be_read_is_said_once_and_again_after_it_could(monkeypatch, ended, caplog):
    answers = [OSError("busy"), OSError("busy"), {"RssAnon": 1}, OSError("busy")]

    def read(pid):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    replace(monkeypatch, MemoryLimits._enforce, memory_of=read)
    kept = MemoryLimits()
    kept.set(own_process(), 2**40)
    said = []
    while answers:
        kept.enforce()
        said.append(len(caplog.records))
    assert said == [1, 1, 1, 2]


def test_exactly_the_limit_is_allowed_and_who_was_ended_is_not_limited_again(monkeypatch, ended):
    used = {"RssAnon": 1000}
    replace(monkeypatch, MemoryLimits._enforce, memory_of=lambda pid: used)
    kept, worker = MemoryLimits(), own_process()
    kept.set(worker, 1000)
    kept.enforce()
    assert (ended, kept.exceeded) == ([], {})
    used["RssAnon"] = 1001
    kept.enforce()
    assert (ended, kept.exceeded) == ([worker], {worker: 1001})
    kept.set(worker, 2**40)
    kept.enforce()
    assert ended == [worker, worker]


@pytest.mark.parametrize(
    ("used", "pause_s"), [(0, 0.1), (10**10 - 10**9, 0.1), (10**10 - 2 * 10**8, 0.04), (10**10, 0.01)]
)
def test_the_next_look_is_the_sooner_the_closer_one_is_to_its_limit(monkeypatch, ended, used, pause_s):
    replace(monkeypatch, MemoryLimits._enforce, memory_of=lambda pid: {"RssAnon": used})
    kept = MemoryLimits()
    kept.set(own_process(), 10**10)
    assert kept.enforce() == pytest.approx(pause_s)


def test_who_can_not_be_looked_at_is_looked_at_again_as_others_are(monkeypatch, ended):
    def fail(pid):
        raise OSError("busy")

    replace(monkeypatch, MemoryLimits._enforce, memory_of=fail)
    kept = MemoryLimits()
    kept.set(own_process(), 2**40)
    assert kept.enforce() == pytest.approx(0.1)
