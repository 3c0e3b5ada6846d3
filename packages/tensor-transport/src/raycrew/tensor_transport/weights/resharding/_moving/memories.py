"""The memory of one rank's parameters: checked against a layout, and seen as regions."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from raycrew.tensor_transport._bytes import fold, tensor_bytes
from raycrew.tensor_transport.errors import ReshardError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.weights.resharding._layouts import (
    Layout,
    Memory,
    Region,
    local_tensor,
    place_of,
)

_FOLDED_ELEMENTS = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def memories_of(
    state: Mapping[str, torch.Tensor], layout: Layout, rank: int, wanted: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The memory of each parameter of one rank, as a tensor of one dimension.

    Args:
        state: Tensors and DTensors by name of the parameter.
        layout: What the rank is said to hold.
        rank: Which rank this is.
        wanted: Only these parameters.

    Raises:
        ReshardError: A parameter is missing, or lies otherwise than the layout says.
    """
    found: dict[str, torch.Tensor] = {}
    for name, dtype, memory in dict.fromkeys(_expected(layout, rank)):
        if wanted is not None and name not in wanted:
            continue
        if name not in state:
            raise ReshardError(
                f"rank {rank} has no {name!r}, which the layout says that it holds", tensor=name
            )
        local = local_tensor(name, state[name])
        has = (str(local.dtype).removeprefix("torch."), tuple(local.shape), local.stride())
        if has[:2] != (dtype, memory.shape) or (local.numel() and not _same(has[2], memory)):
            raise ReshardError(
                f"{name!r} of rank {rank} is {has[0]}{list(has[1])} with strides {list(has[2])}; the layout "
                f"says {dtype}{list(memory.shape)} with strides {list(memory.strides)}",
                tensor=name,
            )
        found[name] = flat_memory(local)
    return found


def tied(state: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, str]:
    """Name -> the first one of the same elements in this process."""
    first: dict[Any, str] = {}
    places = [(name, place_of(local_tensor(name, state[name]))) for name in names]
    return {
        name: first[place]
        for name, place in places
        if place is not None and first.setdefault(place, name) != name
    }


def flat_memory(local: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last one."""
    if not local.numel():
        return local.reshape(-1)
    extent = 1 + sum((n - 1) * step for n, step in zip(local.shape, local.stride(), strict=True))
    return local.as_strided((extent,), (1,))


def view(memory: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a memory, in place."""
    return memory.as_strided(region.shape, region.strides, memory.storage_offset() + region.offset)


def wide_views(
    target: Bytes, into: Region, source: Bytes, wanted: Region, itemsize: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """A region of the target's bytes and one of the source's, in place, as words as wide as fits both.

    Both have the same shape; unbroken runs of elements are copied in longer words.
    """
    numbers = [itemsize * n for region in (into, wanted) for n in (region.offset, *region.strides[:-1])]
    word = itemsize
    if into.strides[-1:] == wanted.strides[-1:] == (1,):
        word = max(
            w for w in _WORDS if itemsize * into.shape[-1] % w == 0 and not any(n % w for n in numbers)
        )
    return _view(target, into, itemsize, word), _view(source, wanted, itemsize, word)


def _view(data: Bytes, region: Region, itemsize: int, word: int) -> npt.NDArray[Any]:
    """A region of a memory's bytes, as words of one element, or of several that lie side by side."""
    begin = region.offset * itemsize
    words = data[begin : begin + (len(data) - begin) // word * word].view(_WORDS[word])
    shape = (*region.shape[:-1], region.shape[-1] * itemsize // word) if word > itemsize else region.shape
    strides = [step * itemsize for step in region.strides]
    if word > itemsize:
        strides[-1] = word
    return as_strided(words, shape, strides)


def pieces(source: Region, target: Region, limit: int) -> Iterator[tuple[Region, Region]]:
    """Both sides of a move, cut alike into regions of at most `limit` elements."""
    if source.size <= limit:
        yield source, target
        return
    inner = source.size // source.shape[0]
    step = max(1, limit // inner)
    for i in range(0, source.shape[0], step):
        count = min(step, source.shape[0] - i)
        cut = [
            Region(r.offset + i * r.strides[0], (count, *r.shape[1:]), r.strides)
            if count > 1 or inner <= limit
            else Region(r.offset + i * r.strides[0], r.shape[1:], r.strides[1:])
            for r in (source, target)
        ]
        yield from pieces(cut[0], cut[1], limit)


def in_memory_order(source: Region, target: Region) -> tuple[Region, Region]:
    """Both sides of a move with their dimensions ordered so that the source is read from front to back."""
    order = sorted(range(len(source.shape)), key=lambda d: -source.strides[d])
    turned = [
        Region(r.offset, tuple(r.shape[d] for d in order), tuple(r.strides[d] for d in order))
        for r in (source, target)
    ]
    return turned[0], turned[1]


def fold_region(memory: torch.Tensor, region: Region) -> int:
    """A fold of a region's values in order, the same on both sides of a move."""
    total = 0
    for part, _ in pieces(region, region, _FOLDED_ELEMENTS):
        total = (total * _FACTOR + fold(tensor_bytes(view(memory, part)))) % 2**64
    return total


class Slot(NamedTuple):
    """Where a parameter's memory begins in an offer."""

    offer: int
    offset: int


def _expected(layout: Layout, rank: int) -> Iterator[tuple[str, str, Memory]]:
    for name, tensor in layout.tensors.items():
        for share in tensor.shares:
            if share.rank == rank:
                parameter = tensor.parameters[share.parameter] if tensor.parameters else name
                yield parameter, tensor.dtype, share.memory


def _same(strides: tuple[int, ...], memory: Memory) -> bool:
    """Whether strides are a memory's; those of dimensions of length one do not matter."""
    return all(
        n == 1 or step == known for n, step, known in zip(memory.shape, strides, memory.strides, strict=True)
    )
