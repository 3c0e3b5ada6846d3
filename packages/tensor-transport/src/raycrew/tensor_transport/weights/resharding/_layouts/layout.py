"""Who holds which part of which tensor, as data: small, picklable, with a digest."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from raycrew.tensor_transport._bytes import parse_torch_dtype
from raycrew.tensor_transport._ray import CachedProperty
from raycrew.tensor_transport.errors import DecodeError, LayoutError
from raycrew.tensor_transport.weights.resharding._layouts.boxes import (
    Block,
    Box,
    Region,
    Shape,
    contains,
    dense_strides,
    dot,
    intersect,
)


@dataclass(frozen=True, slots=True)
class Memory:
    """A parameter as it lies in one rank's memory.

    Attributes:
        shape: Its local shape.
        strides: Its strides, in elements.
        unused: What belongs to no tensor, as the padding of a vocabulary.
    """

    shape: Shape
    strides: Shape
    unused: tuple[Region, ...] = ()

    @classmethod
    def dense(cls, shape: Sequence[int], unused: tuple[Region, ...] = ()) -> "Memory":
        """That of a contiguous parameter."""
        return cls(tuple(shape), dense_strides(shape), unused)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a tensor, in one parameter.

    Attributes:
        rank: Who.
        parameter: Which of the tensor's `parameters`, by index.
        memory: The parameter, which may hold parts of other tensors as well.
        blocks: The boxes that it holds; none in an empty shard.
    """

    rank: int
    parameter: int
    memory: Memory
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where the parts of one tensor are.

    Attributes:
        shape: Of the whole tensor.
        dtype: As "bfloat16".
        shares: What each rank holds. Tensors that are laid out alike have the same object here: what is
            found out about it is found out once.
        parameters: Names of the parameters that hold it; empty where that is the tensor's own name.
    """

    shape: Shape
    dtype: str
    shares: tuple[Share, ...]
    parameters: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize_of(self.dtype)


class Layout:
    """What all ranks of a group hold: tensors by name, each with the boxes that each rank has of it.

    Args:
        tensors: Name -> where its parts are. `layout_of` reads that from tensors and DTensors; `sharded`,
            `on_mesh`, `flat_sharded`, `fused` and `stacked` describe it without having any.

    Raises:
        LayoutError: A block lies outside its tensor, or outside its parameter's memory, or a rank is told of
            twice.
    """

    def __init__(self, tensors: Mapping[str, TensorLayout]) -> None:
        self.tensors: dict[str, TensorLayout] = dict(tensors)
        checked: set[tuple[Shape, int]] = set()
        for name, tensor in self.tensors.items():
            if (key := (tensor.shape, id(tensor.shares))) not in checked:
                _check(name, tensor)
                checked.add(key)

    @CachedProperty
    def digest(self) -> str:
        """What tells this layout from others: the same in all processes."""
        shares: dict[int, str] = {}
        lines = []
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            found = shares.get(id(tensor.shares))
            if found is None:
                found = hashlib.blake2b(repr(tensor.shares).encode(), digest_size=16).hexdigest()
                shares[id(tensor.shares)] = found
            lines.append(f"{name!r} {tensor.dtype} {tensor.shape} {tensor.parameters!r} {found}")
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    @CachedProperty
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold anything."""
        distinct = {id(t.shares): t.shares for t in self.tensors.values()}
        return tuple(sorted({share.rank for shares in distinct.values() for share in shares}))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({len(self.tensors)} tensors on {len(self.ranks)} ranks)"

    def __getstate__(self) -> dict[str, TensorLayout]:
        return self.tensors

    def __setstate__(self, tensors: dict[str, TensorLayout]) -> None:
        self.__init__(tensors)  # type: ignore[misc]

    def rename(self, names: Mapping[str, str] | Callable[[str], str]) -> "Layout":
        """The same under other names, as those of the other side; parameters keep their own.

        Args:
            names: Old name -> new name, what it lacks stays; or a function of the old name.

        Raises:
            LayoutError: Two tensors would have one name, or one to be renamed does not exist.
        """
        renamed = names if callable(names) else _lookup(names, self.tensors)
        found: dict[str, TensorLayout] = {}
        for name, tensor in self.tensors.items():
            if (new := renamed(name)) in found:
                raise LayoutError(f"two tensors would be named {new!r}; the second is {name!r}", tensor=new)
            found[new] = replace(tensor, parameters=tensor.parameters or (name,))
        return Layout(found)

    def split(self, name: str, dim: int, parts: Mapping[str, Sequence[tuple[int, int]]]) -> "Layout":
        """The same with one tensor seen as several, as a fused QKV whose parts the other side holds apart.

        Args:
            name: The tensor.
            dim: The dimension along which its parts lie.
            parts: Name of each part -> the ranges [start, stop) of `dim` that are its, in its own order.

        Raises:
            LayoutError: The tensor does not exist, a range is outside of it, or a part's name is taken.
        """
        whole = self._tensor(name)
        others = {other: tensor for other, tensor in self.tensors.items() if other != name}
        if taken := sorted(others.keys() & parts.keys()):
            raise LayoutError(f"cannot split {name!r}: there is a tensor {taken[0]!r} already", tensor=name)
        return Layout(others | {part: _part(name, whole, dim, runs) for part, runs in parts.items()})

    def _tensor(self, name: str) -> TensorLayout:
        if name not in self.tensors:
            raise LayoutError(f"there is no tensor {name!r}", tensor=name)
        return self.tensors[name]


def join_layouts(layouts: Iterable[Layout]) -> Layout:
    """What several ranks, pipeline stages or expert groups hold, as one layout.

    Raises:
        LayoutError: They disagree about the shape or dtype of a tensor, or one rank tells of it twice.
    """
    found: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        for name, tensor in layout.tensors.items():
            found.setdefault(name, []).append(tensor)
    known: dict[Any, tuple[Share, ...]] = {}
    return Layout({name: _join(name, parts, known) for name, parts in found.items()})


def itemsize_of(dtype: str) -> int:
    """Bytes of an element."""
    try:
        return parse_torch_dtype(dtype).itemsize
    except DecodeError as error:
        raise LayoutError(str(error)) from error


@lru_cache(1 << 16)
def interned(shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """Equal shares as one object, so that what is found out about them is found out once."""
    return shares


def _lookup(names: Mapping[str, str], known: Mapping[str, object]) -> Callable[[str], str]:
    if unknown := sorted(names.keys() - known.keys()):
        raise LayoutError(f"cannot rename what does not exist: {', '.join(unknown[:5])}", tensor=unknown[0])
    return lambda name: names.get(name, name)


def _join(name: str, parts: list[TensorLayout], known: dict[Any, tuple[Share, ...]]) -> TensorLayout:
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise LayoutError(
                f"{name!r} is {part.dtype}{list(part.shape)} on one rank and "
                f"{first.dtype}{list(first.shape)} on another",
                tensor=name,
            )
    parameters, indices = _parameters(name, parts) if any(part.parameters for part in parts) else ((), ())
    key = (indices, tuple([id(part.shares) for part in parts]))
    if key not in known:
        known[key] = _joined_shares(name, parts, indices or ((0,),) * len(parts))
    return TensorLayout(first.shape, first.dtype, known[key], parameters)


def _parameters(name: str, parts: list[TensorLayout]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The parameters of all parts together, and where in them those of each part are."""
    names = [part.parameters or (name,) for part in parts]
    together = tuple(dict.fromkeys(parameter for each in names for parameter in each))
    return together, tuple(tuple(map(together.index, each)) for each in names)


def _joined_shares(
    name: str, parts: list[TensorLayout], indices: tuple[tuple[int, ...], ...]
) -> tuple[Share, ...]:
    shares = [
        replace(share, parameter=index[share.parameter])
        for part, index in zip(parts, indices, strict=True)
        for share in part.shares
    ]
    shares.sort(key=lambda share: (share.rank, share.parameter))
    for a, b in pairwise(shares):
        if (a.rank, a.parameter) == (b.rank, b.parameter):
            raise LayoutError(f"{name!r} is told of twice for rank {a.rank}", tensor=name)
    return interned(tuple(shares))


def _part(name: str, whole: TensorLayout, dim: int, runs: Sequence[tuple[int, int]]) -> TensorLayout:
    for start, stop in runs:
        if not (0 <= dim < len(whole.shape) and 0 <= start <= stop <= whole.shape[dim]):
            raise LayoutError(
                f"{name!r} of shape {list(whole.shape)} has no range {start}:{stop} in dimension {dim}",
                tensor=name,
            )
    length = sum(stop - start for start, stop in runs)
    shape = (*whole.shape[:dim], length, *whole.shape[dim + 1 :])
    shares = tuple(
        replace(share, blocks=tuple(b for block in share.blocks for b in _cut(block, dim, runs)))
        for share in whole.shares
    )
    held = tuple(share for share in shares if share.blocks)
    return TensorLayout(shape, whole.dtype, interned(held), whole.parameters or (name,))


def _cut(block: Block, dim: int, runs: Sequence[tuple[int, int]]) -> Iterable[Block]:
    """What a block holds of some ranges of one dimension, in the coordinates of those ranges."""
    begin = 0
    start, region = block
    for a, b in runs:
        wanted = Box((*start[:dim], a, *start[dim + 1 :]), _with(region.shape, dim, b - a))
        if (found := intersect(block.box, wanted)) is not None:
            yield Block(
                _with(start, dim, begin + found.start[dim] - a),
                Region(
                    region.offset + (found.start[dim] - start[dim]) * region.strides[dim],
                    found.shape,
                    region.strides,
                ),
            )
        begin += b - a


def _with(numbers: Shape, dim: int, value: int) -> Shape:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _check(name: str, tensor: TensorLayout) -> None:
    itemsize_of(tensor.dtype)
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    told: set[tuple[int, int]] = set()
    for share in tensor.shares:
        if (place := (share.rank, share.parameter)) in told:
            raise LayoutError(f"{name!r} is told of twice for rank {share.rank}", tensor=name)
        told.add(place)
        extent = _extent(share.memory.shape, share.memory.strides)
        for start, region in share.blocks:
            box = Box(start, region.shape)
            if len(start) != len(tensor.shape) or not contains(whole, box):
                raise LayoutError(
                    f"rank {share.rank} is said to hold {box} of {name!r}, whose shape is "
                    f"{list(tensor.shape)}",
                    tensor=name,
                    region=str(box),
                )
            begin, end = region.offset, region.offset + _extent(region.shape, region.strides)
            if min(begin, *region.strides, 0) < 0 or end > extent:
                raise LayoutError(
                    f"{box} of {name!r} does not fit into the memory of rank {share.rank}: a parameter of "
                    f"shape {list(share.memory.shape)}",
                    tensor=name,
                    region=str(box),
                )


def _extent(shape: Shape, strides: Shape) -> int:
    """How many elements there are from the first one to the end of the last one."""
    if 0 in shape:
        return 0
    return 1 + dot([n - 1 for n in shape], strides)
