"""What all pulling transports share: checked requests, threads that move bytes, deadlines, folds."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import torch

from raycrew.tensor_transport._bytes import (
    FOLD_BYTES,
    SECTION_BYTES,
    BlockFolds,
    Closing,
    SectionFolds,
    copy_bytes,
    count_write,
    fold_in_sections,
    in_sections,
    remake_in_child,
)
from raycrew.tensor_transport.errors import (
    DamagedBytesError,
    ShardLostError,
    StaleHandleError,
    TransportClosedError,
    TransportError,
)
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports._choosing import WHY_NOT, boot_id, start_of, this_process
from raycrew.tensor_transport.transports._interface import (
    Buffer,
    Capabilities,
    Guard,
    Offer,
    Owner,
    Region,
    Transfer,
    bytes_of,
    memory_of,
)

_BLOCK = 4 * FOLD_BYTES  # What is done between blocks costs no more than one in fifty, nor does the last one.
_THREADS = 64
_Read = Callable[[Bytes, int], object]


@dataclass(frozen=True, slots=True)
class Job:
    """A region, and the buffer that it goes into."""

    region: Region
    target: Bytes

    @property
    def offer(self) -> Offer:
        """Whose bytes they are."""
        return self.region.offer

    def fill(self, read: _Read, guard: Guard, *, in_order: bool = False) -> None:
        """Fill the buffer by `read(part of the buffer, offset in the offer)`, and check the fold.

        Several threads read at once, unless it has to be in order.

        Raises:
            DamagedBytesError: All bytes of an offer with a fold arrived, and theirs differs.
        """
        size = self.target.nbytes
        folds = SectionFolds(size) if self.region.is_whole and self.offer.fold is not None else None
        section, block = (_BLOCK, _BLOCK) if folds is None else (SECTION_BYTES, FOLD_BYTES)

        def take(start: int, stop: int) -> None:
            blocks = None if folds is None else BlockFolds(self.target[start:stop])
            for begin in range(start, stop, block):
                guard.check()
                part = self.target[begin : min(begin + block, stop)]
                read(part, self.region.offset + begin)
                if blocks is not None:
                    blocks.take((begin - start) // FOLD_BYTES)  # While it is in the processor's cache.
            if folds is not None and blocks is not None:
                folds.add(start, blocks.values)

        if in_order:
            for start in range(0, size, section):
                take(start, min(start + section, size))
        else:
            in_sections(size, section, take)
        if folds is not None and folds.value != self.offer.fold:
            raise damaged(self.offer)

    def copy_from(self, source: Bytes, guard: Guard) -> None:
        """`fill` from the bytes of the whole offer.

        Raises:
            StaleHandleError: They are not as many as the offer says.
        """
        if source.nbytes != self.offer.size_bytes:
            raise gone(self.offer, f"{source.nbytes} bytes are there")
        self.fill(lambda part, offset: copy_bytes(part, source[offset : offset + part.nbytes]), guard)


class Puller(Closing):
    """A pulling transport that moves bytes in threads of its own; after a fork the child begins anew."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Transfer] = set()
        self._closed = False
        remake_in_child(self)

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def available(self) -> str | None:
        """Why it can't be used in this process; None where it can."""
        return WHY_NOT[self.name]()

    def pull(
        self, regions: Sequence[Region], into: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> Transfer:
        """See `PullTransport.pull`."""
        jobs = self._jobs(regions, into)
        what = f"a pull of {len(jobs)} regions by {self.name}"
        transfer = Transfer(what, sum(job.region.size_bytes for job in jobs), timeout_s=timeout_s)
        with self._lock:
            self._check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"pull-{self.name}")
            self._under_way.add(transfer)
            transfer.add_done_callback(self._under_way.discard)
            try:
                self._pool.submit(transfer.run, lambda guard: self._fill(jobs, into, guard))
            except RuntimeError as error:  # It is queued, for threads that there may be later.
                transfer.stop()
                raise TransportError(f"{what} can't be begun: {error}") from error
        return transfer

    def map(self, offer: Offer, *, timeout_s: float | None = None) -> Bytes:  # noqa: ARG002
        """See `PullTransport.map`."""
        raise TransportError(
            f"{self.name} has no bytes in place: pull {offer.size_bytes} bytes into a buffer"
        )

    def close(self) -> None:
        """End what is under way with TransportClosedError, and give up what is held. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)  # else what waits begins as others end
        for transfer in tuple(self._under_way):
            transfer.stop(self._closed_meanwhile)
        if pool is not None:
            pool.shutdown(wait=True)
        self._release()

    def after_fork(self) -> None:
        """The threads, and what was offered, are the parent's."""
        self._lock = threading.Lock()
        self._pool = None
        under_way, self._under_way = self._under_way, set()
        for transfer in under_way:
            transfer.leave_to_parent()
        self._forget()

    def _fill(self, jobs: Sequence[Job], into: Sequence[Buffer], guard: Guard) -> None:
        try:
            self._move(jobs, guard)
        finally:
            count_write(buffer for buffer in into if isinstance(buffer, torch.Tensor))

    @abstractmethod
    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        """Fill all buffers."""

    @abstractmethod
    def _release(self) -> None:
        """Give up what is held, when this is closed."""

    @abstractmethod
    def _forget(self) -> None:
        """Let go of the parent's things in a forked child."""

    def _closed_meanwhile(self) -> TransportError:
        return TransportClosedError(f"the transport {self.name} was closed meanwhile")

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError(f"this {type(self).__name__} is closed")

    def _ready_to_offer(self) -> None:
        self._check_open()
        if (reason := self.available()) is not None:
            raise TransportError(f"{self.name} can't be used here: {reason}")

    def _offer(self, key: object, raw: Bytes, folded: bool) -> Offer:
        return Offer(self.name, this_process(), key, raw.nbytes, fold_in_sections(raw) if folded else None)

    def _jobs(self, regions: Sequence[Region], into: Sequence[Buffer]) -> list[Job]:
        if len(regions) != len(into):
            raise ValueError(f"{len(regions)} regions do not fit {len(into)} buffers")
        return [
            Job(region, self._target(i, region, buffer))
            for i, (region, buffer) in enumerate(zip(regions, into, strict=True))
        ]

    def _target(self, i: int, region: Region, buffer: Buffer) -> Bytes:
        check_region(self.name, i, region)
        target = writable_bytes(buffer, f"buffer {i}")
        if target.nbytes != region.size_bytes:
            raise ValueError(f"buffer {i} has {target.nbytes} bytes, its region {region.size_bytes}")
        return target


def check_region(name: str, i: int, region: Region) -> None:
    """Raise ValueError for a region that is not within its offer, or of another transport's."""
    offer, end = region.offer, region.offset + region.size_bytes
    if offer.transport != name:
        raise ValueError(f"region {i} is of an offer by {offer.transport}, not by {name}")
    if region.offset < 0 or region.size_bytes < 0 or end > offer.size_bytes:
        raise ValueError(f"region {i}: bytes {region.offset}..{end} of {offer.size_bytes} do not exist")


def source_bytes(data: Buffer) -> Bytes:
    """Bytes to offer, in place where they are contiguous and on the CPU."""
    return bytes_of(data, "what is offered").cpu().numpy()


def writable_bytes(buffer: Buffer, what: str) -> Bytes:
    """The memory of a caller's buffer.

    Raises:
        ValueError: It is not contiguous, read-only, or on a device.
    """
    memory = memory_of(buffer, what)
    if memory.device.type != "cpu":
        raise ValueError(f"{what} is on {memory.device}: it can't be filled")
    return memory.numpy()


def described(offer: Offer) -> str:
    """What errors call an offer."""
    return f"{offer.size_bytes} bytes offered by {offer.owner}"


def identity(offer: Offer) -> dict[str, str]:
    """What errors of an offer carry."""
    return {"shard_id": str(offer.key), "owner": str(offer.owner), "node_id": offer.owner.node_id}


def gone(offer: Offer, why: str) -> StaleHandleError:
    """The error of an offer that was withdrawn."""
    return StaleHandleError(f"{described(offer)} can't be had: {why}", **identity(offer))


def lost(offer: Offer, why: str) -> ShardLostError:
    """The error of an offer whose owner died, or can't be reached."""
    return ShardLostError(f"{described(offer)} can't be had: {why}", **identity(offer))


def damaged(offer: Offer) -> DamagedBytesError:
    """The error of bytes that arrived otherwise than they were offered."""
    message = f"{described(offer)} arrived damaged by {offer.transport}: their fold differs"
    return DamagedBytesError(message, transport=offer.transport, owner=str(offer.owner))


def check_here(offer: Offer) -> None:
    """Raise ShardLostError for an offer of another machine."""
    if offer.owner.machine != boot_id():
        raise lost(offer, f"{offer.transport} does not reach other machines; choose_transport() does")


def is_alive(owner: Owner) -> bool:
    """Whether the process that made an offer, on this machine and in this container, lives."""
    return start_of(owner.pid) == owner.started
