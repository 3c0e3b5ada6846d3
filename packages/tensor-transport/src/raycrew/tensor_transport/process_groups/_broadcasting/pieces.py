"""How buffers are cut and joined into the pieces that go over the wire one by one; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE_BYTES = 32 << 20
"""The largest piece. Small pieces are slow: under 16 MiB gloo takes up to three times as long for a byte."""

SMALL_BYTES = 16 << 20
"""Buffers below this share a piece, which costs a copy on each side and is still faster."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes `start` to `stop` of the buffer at `index`."""

    index: int
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """How many they are."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes over the wire at a time: a run in place, or several by way of one buffer."""

    runs: tuple[Run, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(run.size_bytes for run in self.runs)

    @property
    def in_place(self) -> bool:
        """Whether it is one run, which needs no copy."""
        return len(self.runs) == 1


def plan_pieces(
    sizes: Sequence[int], piece_bytes: int = PIECE_BYTES, small_bytes: int = SMALL_BYTES
) -> Iterator[Piece]:
    """The pieces of buffers of these sizes, in order; the same wherever the sizes are."""
    small: list[Run] = []
    used = 0
    for index, size in enumerate(sizes):
        if size and size < small_bytes:
            if used + size > piece_bytes:
                yield Piece(tuple(small))
                small, used = [], 0
            small.append(Run(index, 0, size))
            used += size
            continue
        if size and small:
            yield Piece(tuple(small))
            small, used = [], 0
        yield from _parts(index, size, piece_bytes)
    if small:
        yield Piece(tuple(small))


def _parts(index: int, size: int, piece_bytes: int) -> Iterator[Piece]:
    """A large buffer in parts of about the same size."""
    count = -(-size // piece_bytes)
    for part in range(count):
        yield Piece((Run(index, part * size // count, (part + 1) * size // count),))
