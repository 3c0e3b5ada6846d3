"""Boxes of tensors, and where their elements lie in memory: arithmetic on whole numbers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: its first corner, and how long it is in each dimension."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"


class Region(NamedTuple):
    """Some elements of a parameter's memory, counted in elements from its first one."""

    offset: int
    shape: Shape
    strides: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Block(NamedTuple):
    """A box of a tensor, and the region of a rank's memory that holds it; both have the same shape."""

    start: Shape
    region: Region

    @property
    def box(self) -> Box:
        """The box alone."""
        return Box(self.start, self.region.shape)


def dense_strides(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def dot(numbers: Iterable[int], strides: Iterable[int]) -> int:
    """Where an index lies."""
    return sum(a * b for a, b in zip(numbers, strides, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    start = tuple(map(max, a.start, b.start))
    shape = []
    for a0, an, b0, bn, s in zip(*a, *b, start, strict=True):
        length = min(a0 + an, b0 + bn) - s
        if length <= 0:
            return None
        shape.append(length)
    return Box(start, tuple(shape))


def contains(a: Box, b: Box) -> bool:
    """Whether all of `b` lies in `a`."""
    return all(a0 <= b0 and b0 + bn <= a0 + an for a0, an, b0, bn in zip(*a, *b, strict=True))


def subtract(a: Box, hole: Box) -> Iterator[Box]:
    """What is left of `a` without `hole`, a box within it."""
    start, shape = list(a.start), list(a.shape)
    for d, (h0, hn) in enumerate(zip(*hole, strict=True)):
        before, after = h0 - start[d], start[d] + shape[d] - h0 - hn
        if before:
            yield Box(tuple(start), (*shape[:d], before, *shape[d + 1 :]))
        if after:
            yield Box((*start[:d], h0 + hn, *start[d + 1 :]), (*shape[:d], after, *shape[d + 1 :]))
        start[d], shape[d] = h0, hn


def flat_boxes(shape: Shape, begin: int, end: int) -> Iterator[Box]:
    """The elements [begin, end) of a flattened tensor, as boxes in order: at most 2 * dimensions - 1."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, skipped), (last, left) = divmod(begin, inner), divmod(end, inner)
    if first == last or (skipped and first + 1 == last and not left):
        for box in flat_boxes(shape[1:], skipped, left or inner):
            yield Box((first, *box.start), (1, *box.shape))
        return
    if skipped:
        yield from flat_boxes(shape, begin, (first + 1) * inner)
        first += 1
    if last > first:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if left:
        yield from flat_boxes(shape, last * inner, end)


def coalesce(shape: Shape, *strides: Shape) -> tuple[Shape, ...]:
    """The same elements in the same order, in as few dimensions as possible, at least one.

    Returns:
        The shape, and the strides of each memory.
    """
    kept: list[list[int]] = []  # [length, stride, stride, ...] of each dimension
    for length, *steps in zip(shape, *strides, strict=True):
        if length == 1:
            continue
        if kept and all(kept[-1][k] == length * step for k, step in enumerate(steps, 1)):
            kept[-1] = [kept[-1][0] * length, *steps]
        else:
            kept.append([length, *steps])
    columns = zip(*(kept or [[1] * (1 + len(strides))]), strict=True)
    return tuple(tuple(column) for column in columns)


def contiguous_runs(region: Region) -> tuple[npt.NDArray[np.int64], int]:
    """Where each unbroken run of a region begins, in the region's order, and how long all of them are."""
    shape, strides = coalesce(region.shape, region.strides)
    length = 1
    if strides[-1] == 1 or shape[-1] == 1:
        length, shape, strides = shape[-1], shape[:-1], strides[:-1]
    starts = np.full(1, region.offset, np.int64)
    for n, stride in zip(shape, strides, strict=True):
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def covered_once(regions: Iterable[Region], memory: Region) -> tuple[str, int] | None:
    """Whether regions together name each element of a memory once, and no other.

    Returns:
        None, or ("gap" | "overlap" | "outside", the first such element).
    """
    named, there = _bounds(regions), _bounds([memory])
    points = np.concatenate([*named, *there])
    order = np.argsort(points, kind="stable")
    signs = [np.full(len(a), sign) for a, sign in zip(named, (1, -1), strict=True)]
    zeros = [np.zeros(len(a), np.int64) for a in (*named, *there)]
    counts = np.cumsum(np.concatenate([*signs, *zeros[2:]])[order])
    signs = [np.full(len(a), sign) for a, sign in zip(there, (1, -1), strict=True)]
    wanted = np.cumsum(np.concatenate([*zeros[:2], *signs])[order])
    points = points[order]
    differ = (counts != wanted) | (wanted > 1)  # Elements of the memory itself may lie in one place.
    wrong = np.flatnonzero(differ[:-1] & (points[1:] > points[:-1]))
    if not len(wrong):
        return None
    i = wrong[0]
    kind = "gap" if counts[i] < wanted[i] else "outside" if not wanted[i] else "overlap"
    return kind, int(points[i])


def _bounds(regions: Iterable[Region]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the unbroken runs of regions begin, and where they end."""
    none = np.empty(0, np.int64)
    found = [contiguous_runs(region) for region in regions if region.size]
    begins = np.concatenate([none, *(starts for starts, _ in found)])
    ends = np.concatenate([none, *(starts + length for starts, length in found)])
    return begins, ends
