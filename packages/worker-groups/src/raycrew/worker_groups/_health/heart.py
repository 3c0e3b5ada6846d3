"""A worker's heart: a thread that writes into the process's page once a second, and the notes of its calls.

Whoever holds the interpreter's lock keeps the thread from beating. A child that is forked has no such thread,
and writes nothing into its parent's page. Standard library only, as in any environment of a worker.
"""

import itertools
import logging
import os
import sys
import threading
import time
from contextvars import ContextVar
from typing import Any, Self

from raycrew.worker_groups._health.page import (
    BEAT,
    BEGAN,
    DEVICE,
    ENDED,
    FIRST_SLOT,
    METHOD,
    METHOD_BYTES,
    NUMBER,
    SIZE,
    SLOT_WORDS,
    SLOTS,
    TICK,
    TICKED,
    UNKNOWN,
    make_page,
)

logger = logging.getLogger(__name__)

BEAT_S = 1.0
_DEVICE_S = 1.0  # between two looks at the memory of devices


class Heart:
    """Of one worker.

    Args:
        page: Memory to write into, of zeros.
    """

    def __init__(self, page: Any) -> None:
        self._bytes = memoryview(page)[:SIZE]
        self._words, self._times = self._bytes.cast("q"), self._bytes.cast("d")
        self._words[DEVICE] = UNKNOWN
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._free = list(range(FIRST_SLOT + (SLOTS - 1) * SLOT_WORDS, 0, -SLOT_WORDS))
        self._waiting: dict[int, Running] = {}  # more calls than there are slots
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
        now = time.monotonic()
        with self._lock:
            if SLOTS - len(self._free) + len(self._waiting) == 1:
                self._times[TICK] = now
        self._look(now)

    def begin(self, call: "Running") -> None:
        """Note that a call begins."""
        with self._lock:
            call.number = next(self._numbers)
            if self._free:
                self._write(self._free.pop(), call)
            else:
                self._waiting[call.number] = call

    def tick_of(self, call: "Running") -> None:
        """Note that a call goes on."""
        call.ticked = now = time.monotonic()
        with self._lock:
            if call.slot:
                self._times[call.slot + TICKED] = now
        self._look(now)

    def end(self, call: "Running") -> None:
        """Note that a call has ended; the oldest one that found no slot takes its own."""
        now = time.monotonic()
        with self._lock:
            slot, call.slot, call.is_running = call.slot, 0, False
            if not slot:
                self._waiting.pop(call.number, None)
            elif self._waiting:
                self._write(slot, self._waiting.pop(next(iter(self._waiting))))
            else:
                self._times[slot + ENDED] = now
                self._free.append(slot)
        self._look(now)

    def _write(self, slot: int, call: "Running") -> None:
        words, times, text = self._words, self._times, 8 * (slot + METHOD)
        words[slot + NUMBER] = 0
        times[slot + BEGAN], times[slot + TICKED], times[slot + ENDED] = call.began, call.ticked, 0.0
        self._bytes[text : text + METHOD_BYTES] = call.method
        words[slot + NUMBER] = call.number
        call.slot = slot

    def _look(self, now: float) -> None:
        # Not by the thread: torch takes a lock that who allocates may hold, and keeps the interpreter's.
        if now - self._looked > _DEVICE_S:
            self._looked = now
            self._words[DEVICE] = device_bytes()


class Running:
    """A call while it runs, as a context; in any thread or task.

    Args:
        method: What `as_text` made of its name.
        heart: Whose call it is; this process's own by default.
    """

    __slots__ = ("_heart", "began", "is_running", "method", "number", "slot", "ticked")

    def __init__(self, method: bytes, heart: Heart | None = None) -> None:
        self.method = method
        self._heart = heart
        self.number = self.slot = 0
        self.is_running = False

    def __enter__(self) -> Self:
        heart = self._heart or (_own[-1] if _own else None)
        if heart is not None and heart.is_own:
            self._heart, self.is_running = heart, True
            self.began = self.ticked = time.monotonic()
            heart.begin(self)
            _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running and self._heart is not None and self._heart.is_own:
            self._heart.end(self)

    def tick(self) -> None:
        """Note that it goes on, unless it has ended."""
        if self.is_running and self._heart is not None and self._heart.is_own:
            self._heart.tick_of(self)


_own: list[Heart] = []
_current: ContextVar[Running | None] = ContextVar("raycrew_running_call", default=None)


def start_heart(mark: str) -> None:
    """Have this process's heart beat into a page, which is found by the process's mark."""
    _own.append(Heart(make_page(mark)))
    _own[-1].start()


def tick() -> None:
    """Note that the call that this runs in goes on, unless it has ended: its rest says nothing of others.

    Outside of calls, as in a thread of the user's, the worker's only call goes on, if it is in one.
    """
    call = _current.get()
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
    try:
        if cuda is None or not cuda.is_initialized():
            return UNKNOWN
        return sum(cuda.memory_reserved(index) for index in range(cuda.device_count()))
    except Exception as error:  # noqa: BLE001 - a torch that is being imported, or a device that has failed
        logger.debug("the memory of devices can't be told: %s", error)
        return UNKNOWN
