"""A worker's heart: a thread that writes into the process's page once a second, and the notes of its calls.

Whoever holds the interpreter's lock keeps the thread from beating. A child that is forked has no such thread,
and writes nothing into its parent's page. Standard library only, as in any environment of a worker.
"""

import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self
from weakref import ref

from raycrew.worker_groups._on_nodes import (
    BEAT,
    BEAT_S,
    BEGAN,
    DEVICE,
    ENDED,
    FIRST_SLOT,
    METHOD,
    METHOD_BYTES,
    NUMBER,
    RING_AT,
    SIZE,
    SLOT_WORDS,
    SLOTS,
    TICK,
    TICKED,
    UNKNOWN,
    Ring,
    make_page,
)

logger = logging.getLogger(__name__)

_DEVICE_S = 1.0  # between two looks at the memory of devices, of calls that are short
_LONG_S = 0.005  # A call that took as long may have changed it: a look is little to that.
_SLOTS = range(FIRST_SLOT, FIRST_SLOT + SLOTS * SLOT_WORDS, SLOT_WORDS)


class Heart:
    """Of one worker.

    Args:
        page: Memory to write into, of zeros; behind the page itself there may be a ring.
        own_call: Gives the id of the running call, for the ring.
    """

    def __init__(self, page: Any, own_call: Callable[[], bytes] = bytes) -> None:
        memory = memoryview(page)
        self._bytes = memory[:SIZE]
        self._ring = Ring(memory[RING_AT:]) if len(memory) > RING_AT else None
        self._own_call = own_call
        self._words, self._times = self._bytes.cast("q"), self._bytes.cast("d")
        self._words[DEVICE] = UNKNOWN
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        # Weakly: what is raised between two steps of a call's begin or end may keep it from ever ending here.
        self._slots: dict[int, ref[Running] | None] = dict.fromkeys(_SLOTS)
        self._waiting: dict[int, ref[Running]] = {}  # more calls than there are slots
        self._lock = threading.RLock()  # for signal handlers, too
        self._looked = 0.0

    def start(self) -> None:
        """Beat from now on."""
        self._beat()
        threading.Thread(target=self._keep_beating, name="raycrew-heart", daemon=True).start()

    def _keep_beating(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._beat()
            # Idle workers are many: a beat of theirs costs a wake-up and no more.
            is_idle = not self._waiting and not any(self._slots.values())
            if not is_idle and self._lock.acquire(blocking=False):  # to beat in any case
                try:
                    self._reclaim()
                finally:
                    self._lock.release()

    def _beat(self) -> None:
        self._times[BEAT] = time.monotonic()

    @property
    def is_own(self) -> bool:
        """Whether this process is the worker, and not a child that was forked from it."""
        return os.getpid() == self._pid

    def tick(self) -> None:
        """Note that the running call goes on; where several run, nobody knows which is meant."""
        if not self.is_own:
            return
        with self._lock:
            if self._n_running() == 1:
                self._times[TICK] = time.monotonic()

    def begin(self, call: "Running") -> None:
        """Note that a call begins."""
        if self._ring is not None and self._ring.is_wanted(call.began):
            call.id = self._id_of_own_call()
        with self._lock:
            call.number = next(self._numbers)
            self._waiting[call.number] = ref(call)
            self._seat()

    def _id_of_own_call(self) -> bytes:
        try:
            return self._own_call()
        except Exception as error:  # noqa: BLE001 - a call is not noted, and runs all the same
            logger.debug("what this call is called can't be told: %s", error)
            return b""

    def tick_of(self, call: "Running") -> None:
        """Note that a call goes on."""
        if not call.is_waiting:
            self._note(call, time.monotonic())

    def wait_of(self, call: "Running") -> None:
        """Note that a call waits for its caller, which is no silence of its own."""
        self._note(call, math.inf)

    def _note(self, call: "Running", ticked: float) -> None:
        with self._lock:
            call.ticked = ticked
            if call.slot:
                self._times[call.slot + TICKED] = ticked

    def end(self, call: "Running") -> None:
        """Note that a call has ended; the oldest one that found no slot takes its own."""
        now = time.monotonic()
        with self._lock:
            self._clear(call.slot, now)
            self._waiting.pop(call.number, None)
            call.slot, call.is_running = 0, False
            if call.id and self._ring is not None:
                self._ring.note(call.id, call.method, call.began, now, call.paused_s)
            self._seat()
            is_due = now - self._looked > _DEVICE_S or now - call.began > _LONG_S
            if is_due and self._n_running() == 0:
                self._look(now)

    def _n_running(self) -> int:
        held = (*self._slots.values(), *self._waiting.values())
        return sum(1 for call in held if call is not None and call() is not None)

    def _reclaim(self) -> None:
        """Free what calls have that are gone without an end."""
        for slot, held in self._slots.items():
            if held is not None and held() is None:
                self._clear(slot, time.monotonic())
        self._seat()

    def _clear(self, slot: int, now: float) -> None:
        if slot:
            self._times[slot + ENDED] = now
            self._slots[slot] = None

    def _seat(self) -> None:
        """Give slots to the oldest calls that have none."""
        while self._waiting and (slot := self._free_slot()):
            number = next(iter(self._waiting))
            call = self._waiting[number]()
            if call is not None and not call.slot:
                self._write(slot, call)
            del self._waiting[number]

    def _free_slot(self) -> int:
        return next((slot for slot, held in self._slots.items() if held is None), 0)

    def _write(self, slot: int, call: "Running") -> None:
        words, times, text = self._words, self._times, 8 * (slot + METHOD)
        words[slot + NUMBER] = 0
        self._slots[slot], call.slot = ref(call), slot
        times[slot + BEGAN], times[slot + TICKED], times[slot + ENDED] = call.began, call.ticked, 0.0
        self._bytes[text : text + METHOD_BYTES] = call.method
        words[slot + NUMBER] = call.number  # last, so that nothing is told that is half noted

    def _look(self, now: float) -> None:
        # Only when no call runs: torch takes a lock that who allocates may hold, and keeps the interpreter's.
        self._looked = now
        try:
            self._words[DEVICE] = device_bytes()
        except Exception as error:  # noqa: BLE001 - a torch that is being imported, or a device that has failed
            logger.debug("the memory of devices can't be told: %s", error)
            self._words[DEVICE] = UNKNOWN


class Running:
    """A call while it runs, as a context; in any thread or task.

    Args:
        method: What `as_text` made of its name.
        heart: Whose call it is; this process's own by default.
    """

    __slots__ = (
        "__weakref__", "_heart", "began", "id", "is_running", "is_waiting", "method", "number", "paused_at",
        "paused_s", "slot", "ticked",
    )  # fmt: skip

    def __init__(self, method: bytes, heart: Heart | None = None) -> None:
        self.method = method
        self._heart = heart
        self.number = self.slot = 0
        self.id, self.paused_at, self.paused_s = b"", 0.0, 0.0
        self.is_running = self.is_waiting = False

    def __enter__(self) -> Self:
        heart = self._heart or (_own[-1] if _own else None)
        if heart is not None and heart.is_own:
            self._heart, self.is_running = heart, True
            self.began = self.ticked = time.monotonic()
            heart.begin(self)
            _current.set(ref(self))
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running and self._heart is not None and self._heart.is_own:
            self._heart.end(self)

    def tick(self) -> None:
        """Note that it goes on, unless it has ended."""
        if self.is_running and self._heart is not None and self._heart.is_own:
            self._heart.tick_of(self)

    def wait(self) -> None:
        """Note that it waits for its caller to take an item, until `go_on`."""
        self.is_waiting, self.paused_at = True, time.monotonic()
        if self.is_running and self._heart is not None and self._heart.is_own:
            self._heart.wait_of(self)

    def go_on(self) -> None:
        """Note that it waits no longer."""
        self.is_waiting, self.paused_s = False, self.paused_s + time.monotonic() - self.paused_at
        self.tick()


_own: list[Heart] = []
_current: ContextVar[ref[Running] | None] = ContextVar("raycrew_running_call", default=None)


def start_heart(mark: str, own_call: Callable[[], bytes] = bytes) -> None:
    """Have this process's heart beat into a page, which is found by the process's mark.

    Args:
        mark: The process's.
        own_call: Gives the id of the call that asks for it.
    """
    _own.append(Heart(make_page(mark), own_call))
    _own[-1].start()


def tick() -> None:
    """Note that the call that this runs in goes on, unless it has ended: its rest says nothing of others.

    Outside of calls, as in a thread of the user's, the worker's only call goes on, if it is in one.
    """
    current = _current.get()
    if current is not None:
        call = current()
        if call is not None:
            call.tick()
    elif _own:
        _own[-1].tick()


def as_text(method: str) -> bytes:
    """The name of a method as a page has it."""
    return method.encode()[:METHOD_BYTES].ljust(METHOD_BYTES, b"\0")


def device_bytes() -> int:
    """What torch has reserved on devices, if this process uses them already; asking it begins nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return UNKNOWN
    return sum(cuda.memory_reserved(index) for index in range(cuda.device_count()))
