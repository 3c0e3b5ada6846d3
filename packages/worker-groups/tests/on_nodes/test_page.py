"""A worker's page: what its heart writes, and what is read of it in another process."""

import asyncio
import itertools
import math
import mmap
import os
import subprocess
import sys
import threading

import pytest

from raycrew.worker_groups._on_nodes import page
from raycrew.worker_groups._on_nodes.marks import marks_of
from raycrew.worker_groups._on_nodes.page import METHOD_BYTES, SLOTS, open_page, read
from raycrew.worker_groups._on_nodes.sight import on_page
from raycrew.worker_groups._worker import heart
from raycrew.worker_groups._worker.forwarders import _async_generator, _generator
from raycrew.worker_groups._worker.heart import Heart, Running, as_text
from raycrew.worker_groups._worker.shell import Shell
from raycrew.worker_groups.testing import _threads


@pytest.fixture
def memory():
    return memoryview(bytearray(page.SIZE))


@pytest.fixture
def beating(memory):
    return Heart(memory)


def running(memory):
    return [(call.number, call.method) for call in read(memory).calls if not call.ended]


def begin(beating, method):
    return Running(as_text(method), beating).__enter__()


def test_a_page_of_zeros_says_nothing(memory):
    assert read(memory) == (0.0, 0, ())
    Heart(memory)
    assert read(memory).device_bytes is None


def test_a_call_is_told_while_it_runs_and_when_it_ended(memory, beating):
    with Running(as_text("train"), beating) as call:
        (told,) = read(memory).calls
        assert (told.number, told.method, told.ended) == (1, "train", 0.0)
        assert told.began == told.ticked > 0
        call.tick()
        assert read(memory).calls[0].ticked > told.ticked
    assert running(memory) == []
    assert read(memory).calls[0].ended >= told.began


def test_names_of_any_length_and_letters(memory, beating):
    for name in ("é" * 100, "x" * METHOD_BYTES, "_"):
        with Running(as_text(name), beating):
            ((_, method),) = running(memory)
            assert name.startswith(method.rstrip("\ufffd"))
            assert len(method) >= min(len(name), METHOD_BYTES // 2)


def test_the_oldest_calls_are_told_when_there_are_more_than_slots(memory, beating):
    calls = [begin(beating, f"m{i}") for i in range(3 * SLOTS)]
    assert [number for number, _ in running(memory)] == list(range(1, SLOTS + 1))
    calls[SLOTS].__exit__()  # one that is not told
    calls[0].__exit__()
    assert [number for number, _ in running(memory)] == [*range(2, SLOTS + 1), SLOTS + 2]
    for call in calls[1:SLOTS] + calls[SLOTS + 1 :]:
        call.__exit__()
    assert running(memory) == []
    with Running(as_text("next"), beating):
        assert running(memory) == [(3 * SLOTS + 1, "next")]


def test_many_threads_leave_no_call_behind(memory, beating):
    def work():
        for _ in range(300):
            with Running(as_text("work"), beating) as call:
                call.tick()

    threads = [threading.Thread(target=work) for _ in range(2 * SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running(memory) == []
    assert list(beating._slots.values()) == [None] * SLOTS
    assert max(call.number for call in read(memory).calls) == 300 * 2 * SLOTS


def test_a_tick_is_of_the_call_that_it_is_in(memory, beating):
    other = begin(beating, "other")
    with Running(as_text("own"), beating):
        before = read(memory).calls
        heart.tick()
        after = read(memory).calls
    assert after[0] == before[0]
    assert after[1].ticked > before[1].ticked
    other.__exit__()


def tick_in_a_thread():
    thread = threading.Thread(target=heart.tick)
    thread.start()
    thread.join()


def test_a_tick_outside_of_calls_is_of_the_only_one(memory, beating, monkeypatch):
    monkeypatch.setattr(heart, "_own", [beating])
    calls = [begin(beating, "one"), begin(beating, "two")]
    before = read(memory)
    tick_in_a_thread()
    assert read(memory) == before, "it may be of either"
    calls[0].__exit__()
    tick_in_a_thread()
    assert read(memory).calls[1].ticked > before.calls[1].ticked
    calls[1].__exit__()


@pytest.mark.hostile
def test_what_a_call_has_left_behind_says_nothing_of_others(memory, beating, monkeypatch):
    monkeypatch.setattr(heart, "_own", [beating])

    async def background(gate):
        await gate.wait()
        heart.tick()

    async def leave(gate):
        with Running(as_text("leave"), beating):
            return asyncio.create_task(background(gate))

    async def main():
        gate = asyncio.Event()
        left = await asyncio.create_task(leave(gate))
        with Running(as_text("stuck"), beating):
            before = read(memory)
            gate.set()
            await left
            assert read(memory) == before

    asyncio.run(main())


def test_a_tick_of_a_call_that_has_ended_is_not_of_the_next_one_in_its_place(memory, beating):
    first = begin(beating, "first")
    first.__exit__()
    with Running(as_text("second"), beating):
        before = read(memory)
        first.tick()
        assert read(memory) == before


@pytest.mark.hostile
def test_a_forked_child_writes_nothing_into_its_parents_page(monkeypatch):
    with mmap.mmap(-1, page.SIZE) as shared:
        memory = memoryview(shared)
        beating = Heart(memory)
        monkeypatch.setattr(heart, "_own", [beating])
        with Running(as_text("parent"), beating):
            before = bytes(memory)
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    heart.tick()
                    beating.tick()
                    with Running(as_text("child")):
                        heart.tick()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            assert bytes(memory) == before
        beating._bytes.release()
        beating._words.release()
        beating._times.release()
        memory.release()


PROGRAM = """
import os, sys
from raycrew.worker_groups._worker.heart import Running, as_text, start_heart
from raycrew.worker_groups._on_nodes.marks import mark_own_process
mark = mark_own_process()
start_heart(mark)
with Running(as_text("work")):
    print(mark, flush=True)
    sys.stdin.readline()
    os.closerange(3, 4096)
    print("closed", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.hostile
def test_a_page_is_read_from_another_process_whatever_it_closes():
    worker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with worker:
        mark = worker.stdout.readline().strip()
        assert open_page(worker.pid, "0" * 32) is None
        memory = open_page(worker.pid, mark)
        assert memory is not None
        assert memory.readonly
        assert mark not in marks_of(os.getpid()), "who reads it is none of what the worker has started"
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "closed\n"
        assert running(memory) == [(1, "work")]
        beat = read(memory).beat
        assert beat > 0
        worker.stdin.close()
    assert running(memory) == []
    assert open_page(worker.pid, mark) is None


@pytest.mark.hostile
@pytest.mark.parametrize("n_lines", range(1, 60))
def test_what_is_raised_at_any_moment_leaves_no_call_behind(memory, beating, n_lines):
    left = n_lines

    def trace(frame, event, arg):
        nonlocal left
        if event == "line" and frame.f_code.co_filename == heart.__file__:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    def interrupted():
        sys.settrace(trace)
        try:
            with Running(as_text("work"), beating):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    interrupted()
    beating._reclaim()
    assert running(memory) == []
    assert beating._n_running() == 0
    assert list(beating._slots.values()) == [None] * SLOTS
    with Running(as_text("next"), beating):
        assert [method for _, method in running(memory)] == ["next"]


class Streams:
    def __init__(self, memory):
        self.memory = memory

    def items(self):
        yield 1
        assert on_page(self.memory)["calls"][0][3] >= 0.0
        assert not math.isinf(read(self.memory).calls[0].ticked), "it waits no longer"
        yield 2

    async def async_items(self):
        for item in self.items():
            yield item


@pytest.mark.parametrize("kind", ["generator", "async_generator"])
def test_a_stream_whose_caller_is_slow_is_not_silent(memory, beating, monkeypatch, kind):
    monkeypatch.setattr(heart, "_own", [beating])
    shell = Shell()
    shell._raycrew_instance = Streams(memory)

    def is_waiting():
        heart.tick()  # of a thread that goes on meanwhile
        return on_page(memory)["calls"][0][3] == 0.0 and math.isinf(read(memory).calls[0].ticked)

    async def all_taken():
        return [is_waiting() async for _ in _async_generator("async_items", as_text("items"))(shell)]

    if kind == "generator":
        waited = [is_waiting() for _ in _generator("items", as_text("items"))(shell)]
    else:
        waited = asyncio.run(all_taken())
    assert waited == [True, True]
    assert running(memory) == []


def test_devices_are_looked_at_only_when_no_call_runs(memory, beating, monkeypatch):
    torch = Torch(is_used=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(heart, "_own", [beating])
    other = begin(beating, "other")
    with Running(as_text("step"), beating) as call:
        call.tick()
        tick_in_a_thread()
    tick_in_a_thread()
    assert torch.cuda.asked == []
    other.__exit__()
    assert torch.cuda.asked == [0, 1]


def test_devices_are_looked_at_again_after_a_call_that_took_its_time_and_seldom_after_others(
    memory, beating, monkeypatch
):
    """Whoever puts a worker to sleep sees at once what it gave up, however soon after another call."""
    sizes = itertools.count(100)
    monkeypatch.setattr(heart, "device_bytes", lambda: next(sizes))
    begin(beating, "learn").__exit__()
    for _ in range(3):
        short = begin(beating, "short")
        short.began += 60
        short.__exit__()
    assert read(memory).device_bytes == 100
    sleep = begin(beating, "sleep")
    sleep.began -= 0.01
    sleep.__exit__()
    assert read(memory).device_bytes == 101


@pytest.mark.hostile
def test_a_size_that_no_word_holds_is_no_trouble_of_the_call(memory, beating, monkeypatch):
    monkeypatch.setattr(heart, "device_bytes", lambda: 2**70)
    with Running(as_text("step"), beating):
        pass
    assert read(memory).device_bytes is None


class Cuda:
    def __init__(self, is_used):
        self.is_used = is_used
        self.asked = []

    def is_initialized(self):
        return self.is_used

    def device_count(self):
        return 2

    def memory_reserved(self, index):
        self.asked.append(index)
        return 1000 + index


class Torch:
    def __init__(self, is_used):
        self.cuda = Cuda(is_used)


@pytest.mark.parametrize(
    ("torch", "size"), [(None, -1), (object(), -1), (Torch(is_used=False), -1), (Torch(is_used=True), 2001)]
)
def test_device_memory_is_asked_of_torch_only_where_it_is_in_use(monkeypatch, memory, torch, size):
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert heart.device_bytes() == size
    with Running(as_text("step"), Heart(memory)):
        pass
    assert read(memory).device_bytes == (None if size < 0 else size)
    if isinstance(torch, Torch) and not torch.cuda.is_used:
        assert torch.cuda.asked == [], "this would begin to use the device"


def test_items_are_ticks_of_workers_in_this_process_too(memory, beating):
    async def of_async():
        before = read(memory).calls[0].ticked
        await _threads._listed(Streams(memory).async_items())
        return before < read(memory).calls[0].ticked

    with Running(as_text("items"), beating):
        for item in _threads._ticking([1, 2]):
            call = read(memory).calls[0]
            assert call.ticked > call.began, item
        assert asyncio.run(of_async())
