"""How moves fill parameters: in place, through two buffers in turn, or out of mapped memory."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from raycrew.tensor_transport._bytes import copy_elements, flat_memory, parse_torch_dtype, tensor_over
from raycrew.tensor_transport.errors import TransportTimeoutError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports import Offer, PullTransport, Transfer, this_process
from raycrew.tensor_transport.transports import Region as Run
from raycrew.tensor_transport.weights.resharding._layouts import (
    Region,
    contiguous_runs,
    dense_strides,
    itemsize_of,
)
from raycrew.tensor_transport.weights.resharding._moving.memories import (
    in_memory_order,
    pieces,
    view,
    wide_views,
)
from raycrew.tensor_transport.weights.resharding._planning import Move

_ALIGNMENT = 64
_RUNS = 16384
_MAPPED_PART = 32 << 20
_NOTHING = np.empty(0, np.uint8)


class Source(NamedTuple):
    """Where the memory of a move's source parameter begins."""

    offer: Offer
    offset: int


class _Staged(NamedTuple):
    """Where a piece lies in a staging buffer, in elements without gaps, and where it goes."""

    begin: int
    move: Move
    target: Region


@dataclass
class _Batch:
    """What one transfer brings: runs, each into memory of its own or to a place of the staging buffer."""

    offer: Offer
    runs: list[Run] = field(default_factory=list)
    into: list[Bytes | int] = field(default_factory=list)
    staged: list[_Staged] = field(default_factory=list)
    used: int = 0


class Filler:
    """Fills the memories of one rank; one transfer is under way while the one before it is taken apart.

    Args:
        memories: Parameter -> its memory, of one dimension.
        transport: How to pull.
        bucket_bytes: Size of a staging buffer.
        timeout_s: Deadline for everything.
    """

    def __init__(
        self,
        memories: Mapping[str, torch.Tensor],
        transport: PullTransport,
        bucket_bytes: int,
        timeout_s: float | None,
    ) -> None:
        self._memories = memories
        self._raw = {n: flat_memory(m, n).numpy() for n, m in memories.items() if m.device.type == "cpu"}
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._staging: list[Bytes] = []
        self._maps = transport.capabilities.maps

    def fill(self, moves: Iterable[tuple[Source, Move]]) -> None:
        """Carry out all moves; once this has returned or raised, nothing is written any more."""
        under_way: deque[tuple[Transfer, _Batch, Bytes]] = deque()
        try:
            for i, batch in enumerate(self._batches(moves)):
                buffer = self._buffer(i % 2) if batch.used else _NOTHING
                under_way.append((self._start(batch, buffer), batch, buffer))
                if len(under_way) > 1:
                    self._finish(*under_way[0])
                    under_way.popleft()
            while under_way:
                self._finish(*under_way[0])
                under_way.popleft()
        finally:
            for transfer, *_ in under_way:
                transfer.cancel()
            for transfer, *_ in under_way:
                transfer.exception()

    def _batches(self, moves: Iterable[tuple[Source, Move]]) -> Iterator[_Batch]:
        """What is to be pulled, batch by batch, each from one process.

        What is mapped is copied while batches are under way.
        """
        mapped: list[tuple[Source, Move]] = []
        batch: _Batch | None = None
        for source, move in moves:
            if self._is_mapped(source, move):
                mapped.append((source, move))
                continue
            for piece in self._pieces(source, move):
                if batch is not None and not self._fits(batch, piece):
                    yield batch
                    self._copy_all(mapped)
                    batch = None
                batch = batch or _Batch(source.offer)
                _add(batch, piece)
        if batch is not None:
            yield batch
        self._copy_all(mapped)

    def _copy_all(self, mapped: list[tuple[Source, Move]]) -> None:
        while mapped:
            self._copy(*mapped.pop())

    def _in_place(self, move: Move) -> Bytes | None:
        """The bytes of the target, if they are to be those of the source; None where they are not at hand."""
        return self._raw.get(move.target_parameter) if move.dtype == move.target_dtype else None

    def _is_mapped(self, source: Source, move: Move) -> bool:
        """Whether a move is a copy out of mapped memory: what is in one piece is faster pulled."""
        here = self._maps and source.offer.owner.machine == this_process().machine
        return here and not _is_run(move) and self._in_place(move) is not None

    def _pieces(self, source: Source, move: Move) -> Iterator["_Piece"]:
        """A move as runs of the source's bytes: straight into the target, or into a staging buffer."""
        size = itemsize_of(move.dtype)
        if (raw := self._in_place(move)) is not None and _is_run(move):
            begin, length = move.target.offset * size, move.source.size * size
            run = Run(source.offer, source.offset + move.source.offset * size, length)
            yield _Piece([run], raw[begin : begin + length], None)
            return
        for part, target in pieces(*in_memory_order(move.source, move.target), self._bucket_bytes // size):
            starts, length = contiguous_runs(part)
            offsets = (source.offset + starts * size).tolist()
            runs = [Run(source.offer, offset, length * size) for offset in offsets]
            yield _Piece(runs, None, _Staged(0, move, target))

    def _fits(self, batch: _Batch, piece: "_Piece") -> bool:
        """Whether a batch may take a piece: from the same process, and with room in the buffer."""
        return (
            batch.offer.owner == piece.runs[0].offer.owner
            and len(batch.runs) < _RUNS
            and (piece.staged is None or batch.used + piece.size_bytes <= self._bucket_bytes)
        )

    def _start(self, batch: _Batch, buffer: Bytes) -> Transfer:
        into = [
            buffer[place : place + run.size_bytes] if isinstance(place, int) else place
            for run, place in zip(batch.runs, batch.into, strict=True)
        ]
        return self._transport.pull(batch.runs, into, timeout_s=self._left_s())

    def _finish(self, transfer: Transfer, batch: _Batch, buffer: Bytes) -> None:
        """Wait until a batch is there, and put what is staged where it belongs."""
        transfer.wait()
        for begin, move, target in batch.staged:
            dtype = parse_torch_dtype(move.dtype)
            data = buffer[begin : begin + target.size * dtype.itemsize]
            if (raw := self._in_place(move)) is None:
                values = tensor_over(data, dtype, target.shape)
                copy_elements(view(self._memories[move.target_parameter], target), values)
            else:
                whole = Region(0, target.shape, dense_strides(target.shape))
                np.copyto(*wide_views(raw, target, data, whole, dtype.itemsize))

    def _copy(self, source: Source, move: Move) -> None:
        """Copy out of mapped memory, as fast as strides allow."""
        raw = self._raw[move.target_parameter]
        held = self._transport.map(source.offer, timeout_s=self._left_s())[source.offset :]
        size = itemsize_of(move.dtype)
        for part, target in pieces(move.source, move.target, _MAPPED_PART // size):
            self._left_s()
            np.copyto(*wide_views(raw, target, held, part, size))

    def _buffer(self, number: int) -> Bytes:
        while len(self._staging) <= number:
            self._staging.append(np.empty(self._bucket_bytes, np.uint8))
        return self._staging[number]

    def _left_s(self) -> float | None:
        """Seconds until the deadline.

        Raises:
            TransportTimeoutError: It has passed.
        """
        if self._deadline is None:
            return None
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TransportTimeoutError(f"the shards did not arrive within {self._timeout_s} s")
        return left


class _Piece(NamedTuple):
    """Runs of one offer that go to one place: memory of the target, or some place of a staging buffer."""

    runs: list[Run]
    target: Bytes | None
    staged: _Staged | None

    @property
    def size_bytes(self) -> int:
        """Bytes of all runs."""
        return len(self.runs) * self.runs[0].size_bytes


def _is_run(move: Move) -> bool:
    return move.source.strides == move.target.strides == (1,)


def _add(batch: _Batch, piece: _Piece) -> None:
    batch.runs += piece.runs
    if piece.target is not None:
        batch.into.append(piece.target)
    if piece.staged is not None:
        batch.staged.append(piece.staged._replace(begin=batch.used))
        step = piece.runs[0].size_bytes
        batch.into += range(batch.used, batch.used + piece.size_bytes, step)
        batch.used += -(-piece.size_bytes // _ALIGNMENT) * _ALIGNMENT
