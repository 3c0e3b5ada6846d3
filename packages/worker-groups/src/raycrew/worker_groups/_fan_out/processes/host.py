"""The actor on each node that owns the processes and gives them batches."""

import logging
import pathlib
import threading
from collections import deque
from collections.abc import Mapping

import ray

from raycrew.worker_groups._fan_out.processes.code import Code
from raycrew.worker_groups._fan_out.processes.journal import Stamp
from raycrew.worker_groups._fan_out.processes.slots import ForkServer, Slot
from raycrew.worker_groups._fan_out.processes.supervision import BatchReport, supervise

logger = logging.getLogger(__name__)

CONTROL = "control"
"""Threads of their own for what must get through even when every thread for batches waits."""


class FanOutHost:
    """The actor: at most `limit` batches run at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._server = ForkServer()
        self._free: list[Slot] = []
        self._running: set[Slot] = set()
        self._cancelled: deque[str] = deque(maxlen=1000)
        self._busy = 0
        self._closed = False
        self._turn = threading.Condition()

    @ray.method(concurrency_group=CONTROL)
    def ready(self) -> str:
        """Node id of this host, once it can run batches."""
        self._free.append(self._server.fork())
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def run(
        self,
        call_id: str,
        limit: int,
        batch: int,
        keys: tuple[str, str | None],
        function: bytes,
        initializer: bytes | None,
        payloads: list[bytes],
        timeout_s: float | None,
        secrets: Mapping[str, str],
    ) -> BatchReport:
        """Run one batch; it ends early at an item that does not end by itself.

        Args:
            call_id: What `cancel` names.
            limit: Most batches at a time.
            batch: Its number, which no other batch on this host has.
            keys: Of the function and of the initializer.
            function: Pickled.
            initializer: Pickled.
            payloads: The items, pickled.
            timeout_s: Seconds for each.
            secrets: Variables that the process has from now on.
        """
        before = None if keys[1] is None else Code(keys[1], initializer)
        with self._turn:
            while self._busy >= limit and call_id not in self._cancelled:
                self._turn.wait()
            if call_id in self._cancelled:
                return BatchReport("cancelled", b"")
            self._busy += 1
        try:
            return self._run(call_id, batch, before, Code(keys[0], function), payloads, timeout_s, secrets)
        finally:
            with self._turn:
                self._busy -= 1
                self._turn.notify_all()

    @ray.method(concurrency_group=CONTROL)
    def cancel(self, call_id: str) -> None:
        """Give up a call: what waits is not started, what runs is killed."""
        with self._turn:
            self._cancelled.append(call_id)
            self._turn.notify_all()
            for slot in self._running:  # under the lock, so that none is given to another call meanwhile
                if slot.call_id == call_id:
                    slot.end()

    @ray.method(concurrency_group=CONTROL)
    def close(self) -> None:
        """End all processes and what they have started, and wait for that."""
        with self._turn:
            self._closed = True
            server = self._server
        server.close()

    @ray.method(concurrency_group=CONTROL)
    def statistics(self) -> dict[str, int]:
        """Processes, threads and file descriptors of this host, to show that nothing leaks."""
        with self._turn:
            processes = len(self._free) + len(self._running)
        descriptors = sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir())
        return {"processes": processes, "threads": threading.active_count(), "descriptors": descriptors}

    def _run(
        self,
        call_id: str,
        batch: int,
        initializer: Code | None,
        function: Code,
        payloads: list[bytes],
        timeout_s: float | None,
        secrets: Mapping[str, str],
    ) -> BatchReport:
        try:
            slot = self._take(call_id)
        except ConnectionError as error:
            return BatchReport("lost", b"", str(error))
        if slot is None:
            return BatchReport("cancelled", b"")
        reusable = False
        try:
            message = slot.message(batch, secrets, initializer, function, payloads)
            stamp = Stamp(slot.number, batch, slot.pid)
            report = supervise(slot, stamp, message, len(payloads), timeout_s)
            reusable = report.stop == "done"
            return BatchReport("cancelled", b"") if call_id in self._cancelled else report
        finally:
            self._give_back(slot, reusable)

    def _take(self, call_id: str) -> Slot | None:
        """A slot that `cancel` will find, None where the call was given up already."""
        slot = self._idle() or self._fork()
        with self._turn:
            if call_id in self._cancelled:
                self._free.append(slot)
                return None
            slot.call_id = call_id
            self._running.add(slot)
        return slot

    def _idle(self) -> Slot | None:
        """A free slot; one that has died or said something meanwhile is let go."""
        while True:
            with self._turn:
                if not self._free:
                    return None
                slot = self._free.pop()
            if slot.is_idle():
                return slot
            slot.end()
            slot.close()

    def _fork(self) -> Slot:
        """A fresh slot, from another fork server if this one has died: no item is to blame for that."""
        server = self._server
        try:
            return server.fork()
        except ConnectionError as error:
            server.close()
            with self._turn:
                if self._closed:
                    raise
                if self._server is server:
                    logger.warning("starting another fork server on this node: %s", error)
                    self._server = ForkServer()
        return self._server.fork()

    def _give_back(self, slot: Slot, reusable: bool) -> None:
        with self._turn:
            self._running.discard(slot)
            slot.call_id = ""
            if reusable and not slot.ended and not slot.dead.is_set():
                self._free.append(slot)
                return
        slot.end()  # whatever it is doing must not be taken for the next batch
        slot.close()
