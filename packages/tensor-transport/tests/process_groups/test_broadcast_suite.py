"""The suite of broadcast transports sees each of these faults: it would not be worth much otherwise."""

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycrew.tensor_transport.testing._broadcasting import checks
from raycrew.tensor_transport.transports import Transfer, bytes_of, memory_of

pytestmark = pytest.mark.hostile

WAIT_S = 60


class Line:
    """What one member of a group says to the others, which all keep."""

    def __init__(self, fault):
        self.fault, self.heard, self.sent = fault, [queue.Queue() for _ in range(3)], []

    def say(self, data):
        self.sent.append(data)
        if self.fault == "mixes":
            if len(self.sent) < 4:
                return
            self.sent[0], self.sent[3] = self.sent[3], self.sent[0]
        for each in self.sent:
            for heard in self.heard:
                heard.put(each)
        self.sent.clear()


class Careless:
    """Sends copies, waits for nobody, and compares nothing."""

    def __init__(self, line, rank):
        self.line, self.rank = line, rank

    def send(self, buffers, *, window_bytes=None, timeout_s=None):
        data = [bytes_of(buffer, "it").clone() for buffer in buffers]
        if self.line.fault == "damages":
            data[0][-1] ^= 1
        self.line.say(data)
        return self.begun(lambda guard: None, timeout_s)

    def receive(self, into, *, window_bytes=None, timeout_s=None):
        def take(guard):
            data = self.line.heard[self.rank].get(timeout=WAIT_S)
            for buffer, found in zip(into, data, strict=True):
                memory_of(buffer, "it").copy_(found)

        return self.begun(take, timeout_s)

    def begun(self, work, timeout_s):
        transfer = Transfer("a broadcast", 0, timeout_s=timeout_s)
        before = getattr(self, "last", None)

        def act(guard):
            if before is not None:
                before.exception(WAIT_S)
            work(guard)

        self.last = transfer
        threading.Thread(target=transfer.run, args=(act,)).start()
        return transfer


class Member:
    """A thread in place of a process."""

    def __init__(self, transport):
        self.pid, self.transport, self.pool = os.getpid(), transport, ThreadPoolExecutor(1)

    def begin(self, fn, *args):
        self.running = self.pool.submit(fn, self.transport, *args)

    def result(self):
        return self.running.result(WAIT_S)


def members(fault):
    line = Line(fault)
    return [Member(Careless(line, rank)) for rank in range(3)]


@pytest.mark.parametrize(
    ("fault", "check", "seen"),
    [
        ("damages", checks._check_contents, "other bytes than those sent arrived"),
        ("mixes", checks._check_order, "met each other"),
        ("hoards", checks._check_memory, "bytes of memory, over"),
        ("compares nothing", checks._check_mismatch, "ValueError was expected"),
        ("waits for nobody", checks._check_absent, "TransportTimeoutError was expected"),
    ],
)
def test_a_fault_is_seen(fault, check, seen):
    with pytest.raises(AssertionError, match=seen):
        check(members(fault), "cpu")


def test_what_has_no_fault_of_its_contents_or_order_passes():
    for check in (checks._check_contents, checks._check_order):
        check(members(None), "cpu")
