"""Device memory of another process on the machine, copied from device to device."""

import contextlib
import secrets
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from raycrew.tensor_transport._bytes import fold_in_sections, named_errors
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.transports._choosing import this_process
from raycrew.tensor_transport.transports._interface import (
    Buffer,
    Capabilities,
    Guard,
    Offer,
    Region,
    Transfer,
    bytes_of,
    memory_of,
)
from raycrew.tensor_transport.transports._native import cuda_driver, marks
from raycrew.tensor_transport.transports._pulling import (
    Job,
    Puller,
    check_here,
    check_region,
    damaged,
    described,
    gone,
    is_alive,
    lost,
)

_BLOCK = 1 << 30
_MARKS = 4096
_alive: "weakref.WeakSet[CudaIpcTransport]" = weakref.WeakSet()
"""Those of this process: what one of them offers, the driver does not open here for another one."""


class _Key(NamedTuple):
    """An exported allocation, the place in it, and the mark that its owner has while the offer stands."""

    device: str
    handle: bytes
    offset: int
    size_bytes: int
    marks_fd: int
    marks_name: str
    slot: int
    mark: int


class CudaIpcTransport(Puller):
    """Offers lend device memory, which readers on the machine open and copy without any help of the owner.

    A mark stands for each offer until it is withdrawn, in a file of the owner's that has no name, and is read
    before and after the bytes; then the time at which the owner was started is. The device's memory is mapped
    no longer than a pull takes, so that it can be freed afterwards. What is not on a device is copied to one
    when it is offered. `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` makes memory that can't be shared
    this way.
    """

    name = "cuda_ipc"

    def __init__(self) -> None:
        self._marking = threading.Lock()
        self._hold_nothing()
        super().__init__()
        _alive.add(self)

    @property
    def capabilities(self) -> Capabilities:
        """Devices of one machine; buffers may be on the CPU, too."""
        return Capabilities(reach="node", devices=("cuda", "cpu"), one_sided=True)

    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """See `PullTransport.offer`: it waits for what the current stream does to the tensor."""
        self._ready_to_offer()
        raw = _device_bytes(data)
        torch.cuda.current_stream(raw.device).synchronize()
        handle, offset = cuda_driver.export(raw) if raw.numel() else (b"", 0)
        device = str(torch.cuda.get_device_properties(raw.device).uuid)
        key = _Key(device, handle, offset, raw.numel(), *self._mark(raw))
        return Offer(self.name, this_process(), key, raw.numel(), fold_in_sections(raw) if folded else None)

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """See `PullTransport.withdraw`."""
        with self._marking:
            for offer in offers:
                held = self._held.pop(offer.key.mark, None)
                if held is not None and self._marks is not None:
                    self._marks.write(held[1], 0)
                    self._free.append(held[1])

    def pull(
        self, regions: Sequence[Region], into: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> Transfer:
        """See `PullTransport.pull`: it begins after what the current stream does to the buffers."""
        for device in {b.device for b in into if isinstance(b, torch.Tensor) and b.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return super().pull(regions, into, timeout_s=timeout_s)

    def _hold_nothing(self) -> None:
        self._marks: marks.Marks | None = None
        self._free = list(range(_MARKS))
        self._held: dict[int, tuple[torch.Tensor, int]] = {}

    def _mark(self, raw: torch.Tensor) -> tuple[int, str, int, int]:
        """Hold memory, and set a mark for it: the last parts of its key."""
        with self._marking:
            self._check_open()
            if self._marks is None:
                with named_errors("marks of offers"):
                    self._marks = marks.Marks(_MARKS)
                self._ended = weakref.finalize(self, self._marks.take_away)
            if not self._free:
                raise TransportError(f"more than {_MARKS} offers: withdraw some, or pack them")
            slot, mark = self._free.pop(), secrets.randbits(62) | 1
            self._held[mark] = raw, slot
            self._marks.write(slot, mark)
            return self._marks.fd, self._marks.name, slot, mark

    def _target(self, i: int, region: Region, buffer: Buffer) -> torch.Tensor:  # type: ignore[override]
        check_region(self.name, i, region)
        target = memory_of(buffer, f"buffer {i}")
        if target.numel() != region.size_bytes:
            raise ValueError(f"buffer {i} has {target.numel()} bytes, its region {region.size_bytes}")
        return target

    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        by_key: dict[tuple[_Key, int], list[Job]] = defaultdict(list)
        for job in jobs:
            by_key[job.offer.key, job.offer.owner.pid].append(job)
        for members in by_key.values():
            self._move_from(members[0].offer, members, guard)

    def _move_from(self, offer: Offer, jobs: Sequence[Job], guard: Guard) -> None:
        key: _Key = offer.key
        device = cuda_driver.device_of(key.device)
        if device is None:
            raise lost(offer, f"this process does not see the device {key.device}")
        guard.check()
        check_here(offer)
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own), contextlib.ExitStack() as stack:
            try:
                mark = stack.enter_context(_mark_of(offer))
                _check(offer, mark)
                source = self._source(stack, offer, device)
                for job in jobs:
                    _fill(job, source, guard)
                _check(offer, mark)
            except TransportError as error:
                if not is_alive(offer.owner):
                    raise lost(offer, "its owner is dead") from error
                raise
            if not is_alive(offer.owner):  # It was this process, then, that had the memory all the time.
                raise lost(offer, "its owner is dead")

    def _source(self, stack: contextlib.ExitStack, offer: Offer, device: int) -> torch.Tensor:
        key: _Key = offer.key
        if offer.owner == this_process() and (held := _lent_here(key.mark)) is not None:
            return held
        if not key.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
        return stack.enter_context(cuda_driver.opened(key.handle, key.offset, key.size_bytes, device))

    def _release(self) -> None:
        with self._marking:
            if self._marks is not None:
                self._ended()
            self._hold_nothing()

    def _forget(self) -> None:
        """A forked child can't use the parent's devices: what it pulls or offers is refused by CUDA."""
        self._marking = threading.Lock()
        if self._marks is not None:
            self._ended.detach()
            self._marks.let_go()
        self._hold_nothing()

    def _lent(self, mark: int) -> torch.Tensor | None:
        with self._marking:
            held = self._held.get(mark)
        return None if held is None else held[0]


@contextlib.contextmanager
def _mark_of(offer: Offer) -> Iterator[Callable[[], int]]:
    """What tells the mark that stands for an offer now."""
    key: _Key = offer.key
    if offer.owner == this_process():
        yield lambda: key.mark if _lent_here(key.mark) is not None else 0
        return
    try:
        found = contextlib.ExitStack()
        mark = found.enter_context(marks.reading(offer.owner.pid, key.marks_fd, key.marks_name, key.slot))
    except FileNotFoundError as error:
        raise gone(offer, "it was withdrawn with all that its owner offered") from error
    except OSError as error:
        raise TransportError(f"the mark of {described(offer)} can't be read: {error}") from error
    with found:
        yield mark


def _check(offer: Offer, mark: Callable[[], int]) -> None:
    """Raise unless the offer stands."""
    if mark() != offer.key.mark or offer.size_bytes != offer.key.size_bytes:
        raise gone(offer, "it was withdrawn, or its memory is used otherwise")


def _lent_here(mark: int) -> torch.Tensor | None:
    """What this process has lent with a mark, by whichever of its transports; None where it has not."""
    found = (transport._lent(mark) for transport in tuple(_alive))  # noqa: SLF001 - of its own kind
    return next((raw for raw in found if raw is not None), None)


def _fill(job: Job, source: torch.Tensor, guard: Guard) -> None:
    """Copy block by block, with two under way at most; nothing is written after the end."""
    target: torch.Tensor = job.target  # type: ignore[assignment]
    start, size = job.region.offset, job.region.size_bytes
    stream = torch.cuda.current_stream(source.device)
    under_way: deque[Any] = deque()
    try:
        for begin in range(0, size, _BLOCK):
            guard.check()
            part = target[begin : begin + _BLOCK]
            part.copy_(source[start + begin : start + begin + len(part)], non_blocking=True)
            under_way.append(stream.record_event())
            if len(under_way) > 1:
                under_way.popleft().synchronize()
    finally:
        stream.synchronize()
    if job.region.is_whole and job.offer.fold is not None and fold_in_sections(target) != job.offer.fold:
        raise damaged(job.offer)


def _device_bytes(data: Buffer) -> torch.Tensor:
    """Bytes to offer on a device, in place if they are there and contiguous."""
    raw = bytes_of(data, "what is offered")
    return raw if raw.is_cuda else raw.cuda()
