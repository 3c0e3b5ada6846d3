"""Names whose memory overlaps without being one tensor: what is written to one of them changes the others."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from raycrew.tensor_transport._bytes import extent_of, flat_bytes
from raycrew.tensor_transport.weights._update.twins import part_here, start_of, twins_of


class Extent(NamedTuple):
    """Where a tensor's elements lie: which bytes of a memory, and how they are read; strides in elements."""

    memory: Any
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    is_conj: bool
    is_neg: bool

    @property
    def is_dense(self) -> bool:
        """Whether each byte between the first and the last one is the tensor's."""
        return math.prod(self.shape) * self.itemsize == self.end - self.start

    @property
    def is_nested(self) -> bool:
        """Whether each dimension lies within one step of the one before, as in parts of a dense tensor."""
        steps = list(zip(self.shape, self.strides, strict=True))
        inner_ones = pairwise([*steps, (1, 1)])
        return all(step >= size * inner > 0 for (_, step), (size, inner) in inner_ones)

    def within(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """The tensor's bytes, [*shape, itemsize], in a memory of one-byte elements that begins at `start`."""
        steps = [stride * self.itemsize for stride in self.strides]
        return memory.as_strided((*self.shape, self.itemsize), (*steps, 1), self.start - start)

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What lies there once a tensor was copied to this one: uint8, [*shape, itemsize], on the CPU."""
        lying = tensor.detach().conj() if self.is_conj else tensor.detach()
        return flat_bytes(-lying if self.is_neg else lying).cpu().view(*self.shape, self.itemsize)


Overlap = Mapping[str, Extent]
"""Names, each of which has bytes of another one."""


def overlaps_of(tensors: Mapping[str, torch.Tensor]) -> list[Overlap]:
    """Names that have some bytes in common, without being one tensor (`twins_of`); DTensors are left out.

    So are expanded ones, which nobody writes to. As there, those without memory are told by their storage.
    """
    extents = {name: found for name, tensor in tensors.items() if (found := _extent(tensor)) is not None}
    twins = twins_of(tensors)
    groups: dict[str, frozenset[str]] = {}
    before: dict[Any, list[str]] = {}
    for name in sorted(extents, key=lambda name: extents[name].start):
        its = extents[name]
        near = [other for other in before.get(its.memory, ()) if extents[other].end > its.start]
        for other in near:
            is_twin = name in twins and twins[name] == twins.get(other)
            if not is_twin and _touch(its, extents[other]):
                joined = groups.get(name, frozenset([name])) | groups.get(other, frozenset([other]))
                groups |= dict.fromkeys(joined, joined)
        before[its.memory] = [*near, name]
    return [{name: extents[name] for name in extents if name in group} for group in set(groups.values())]


class Image:
    """What lies in the memory of an overlap while one tensor of it after another is written there."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._start = min(extent.start for extent in overlap.values())
        size = max(extent.end for extent in overlap.values()) - self._start
        self._memory = torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._is_known = torch.zeros(size, dtype=torch.bool, device="cpu")
        self._written: list[str] = []

    def write(self, name: str, tensor: torch.Tensor) -> str | None:
        """Write one; the name of one before that has other bytes where both lie, None if there is none."""
        extent, other = self._overlap[name], None
        there, new = extent.within(self._memory, self._start), extent.bytes_of(tensor)
        differ = (there != new) & extent.within(self._is_known, self._start)
        if differ.any():
            other = next(each for each in self._written if self._has_one_of(each, extent, differ))
        there.copy_(new)
        extent.within(self._is_known, self._start).fill_(True)
        self._written.append(name)
        return other

    def _has_one_of(self, name: str, extent: Extent, differ: torch.Tensor) -> bool:
        its = torch.zeros_like(self._is_known)
        self._overlap[name].within(its, self._start).fill_(True)
        return bool((extent.within(its, self._start) & differ).any())


def _extent(tensor: torch.Tensor) -> Extent | None:
    """Where it lies; None where that can't be told, or it is of other processes, too, or not written to."""
    part = part_here(tensor)
    if part is None or part is not tensor or _repeats(part):
        return None
    first, end = extent_of(part)
    memory, start = start_of(part)
    reading = (part.itemsize, part.is_conj(), part.is_neg())
    return Extent(memory, start, start + end - first, tuple(part.shape), part.stride(), *reading)


def _repeats(part: torch.Tensor) -> bool:
    """Whether one element is several of the tensor, as where it was expanded: torch writes to none such."""
    return any(size > 1 and not step for size, step in zip(part.shape, part.stride(), strict=True))


def _touch(a: Extent, b: Extent) -> bool:
    """Whether two extents of one memory have a byte in common; each begins before the other one ends."""
    if a.is_dense and b.is_dense:
        return True
    offset, rest = divmod(b.start - a.start, a.itemsize)
    if (a.itemsize, a.strides) == (b.itemsize, b.strides) and a.is_nested and b.is_nested and not rest:
        return _meet(offset, list(zip(a.strides, a.shape, b.shape, strict=True)))
    start = min(a.start, b.start)
    taken = torch.zeros(max(a.end, b.end) - start, dtype=torch.bool, device="cpu")
    a.within(taken, start).fill_(True)
    return bool(b.within(taken, start).any())


def _meet(offset: int, dimensions: Sequence[tuple[int, int, int]]) -> bool:
    """Whether an element of one tensor is one of another, which begins so many elements later.

    Args:
        offset: In elements.
        dimensions: Stride and both sizes of each, the outermost one first.
    """
    if not dimensions:
        return offset == 0
    (step, size, other), *inner = dimensions
    nearest = (offset // step, offset // step + 1)  # All of the inner dimensions is less than a step.
    return any(-other < steps < size and _meet(offset - steps * step, inner) for steps in nearest)
