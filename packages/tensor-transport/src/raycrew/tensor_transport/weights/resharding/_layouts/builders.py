"""Layouts described rather than read: splits over meshes of ranks, and flat shards."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from raycrew.tensor_transport.errors import LayoutError
from raycrew.tensor_transport.weights.resharding._layouts.boxes import (
    Block,
    Region,
    Shape,
    dense_strides,
    dot,
    flat_boxes,
)
from raycrew.tensor_transport.weights.resharding._layouts.layout import Memory, Share, TensorLayout

Ranges = tuple[tuple[int, int], ...]
"""Indices of one dimension, as ranges [start, stop) in order."""
Nested = Sequence["int | Nested"]


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension of a mesh splits one of a tensor, as `torch.chunk` does: trailing parts may be empty.

    Attributes:
        dim: The dimension of the tensor.
        factor: How many parts there are already; each of them is split, and a rank has its share of each (the
            `_StridedShard` of FSDP over tensor parallelism).
    """

    dim: int
    factor: int = 1


def replicated(shape: Sequence[int], dtype: str, ranks: Sequence[int]) -> TensorLayout:
    """A tensor that each rank holds whole."""
    return on_mesh(shape, dtype, ranks, [None])


def sharded(
    shape: Sequence[int],
    dtype: str,
    ranks: Sequence[int],
    dim: int = 0,
    *,
    parts: int | None = None,
    padded: int | None = None,
) -> TensorLayout:
    """A tensor split over ranks along one dimension: FSDP (0), column (0), row (1) or vocabulary parallel.

    Args:
        shape: Of the whole tensor.
        dtype: As "bfloat16".
        ranks: Who holds the parts, in order.
        dim: The dimension that is split as `torch.chunk` does; trailing parts may be smaller or empty.
        parts: How many different parts there are, if fewer than ranks: each is held by as many neighbours,
            as the key and value heads of grouped-query attention are.
        padded: The length of `dim` as held, if it is padded; all ranks hold equally much of that.

    Raises:
        LayoutError: There is no such dimension, `parts` does not divide the ranks, or `padded` is too short
            or no multiple of the parts.
    """
    parts = len(ranks) if parts is None else parts
    if not 0 <= dim < len(shape):
        raise LayoutError(f"a tensor of shape {list(shape)} has no dimension {dim} to be split")
    if parts < 1 or len(ranks) % parts:
        raise LayoutError(f"{parts} parts can't be held by {len(ranks)} ranks, each by as many of them")
    if padded is not None and (padded < shape[dim] or padded % parts):
        raise LayoutError(
            f"a length of {shape[dim]} can't be padded to {padded}, in {parts} parts of one length"
        )
    return TensorLayout(tuple(shape), dtype, _sharded(tuple(shape), tuple(ranks), dim, parts, padded))


def on_mesh(shape: Sequence[int], dtype: str, mesh: Nested, splits: Sequence[Split | None]) -> TensorLayout:
    """A tensor on a mesh of ranks, as a DTensor is.

    Args:
        shape: Of the whole tensor.
        dtype: As "bfloat16".
        mesh: Ranks, nested once for each dimension of the mesh.
        splits: What each dimension of the mesh does; None holds copies.

    Raises:
        LayoutError: The mesh is ragged or has another number of dimensions, or a split is impossible.
    """
    extents, ranks = _flatten(mesh)
    if len(extents) != len(splits):
        raise LayoutError(f"{len(splits)} splits do not fit a mesh of {len(extents)} dimensions")
    for split in splits:
        if split is not None and not (0 <= split.dim < len(shape) and split.factor >= 1):
            raise LayoutError(f"a tensor of shape {list(shape)} can't be split by {split}")
    return TensorLayout(tuple(shape), dtype, _on_mesh(tuple(shape), extents, ranks, tuple(splits)))


def flat_sharded(
    tensors: Mapping[str, tuple[Sequence[int], str]], ranks: Sequence[int], parameter: str
) -> dict[str, TensorLayout]:
    """Tensors flattened one after another into one parameter that is cut evenly, as FSDP's FlatParameter.

    Args:
        tensors: Name -> (shape, dtype), in the order of the parameter.
        ranks: Who holds the parts, in order; the last one's are padded.
        parameter: Name of the parameter on each rank.

    Raises:
        LayoutError: The dtypes differ, or nobody holds a part.
    """
    if not ranks:
        raise LayoutError("a flat parameter is held by at least one rank")
    if len(dtypes := {dtype for _, dtype in tensors.values()}) > 1:
        raise LayoutError(f"tensors of one flat parameter have one dtype, not {sorted(dtypes)}")
    shapes = tuple(tuple(shape) for shape, _ in tensors.values())
    found = _flat_sharded(shapes, tuple(ranks))
    return {
        name: TensorLayout(tuple(shape), dtype, shares, (parameter,))
        for (name, (shape, dtype)), shares in zip(tensors.items(), found, strict=True)
    }


def qkv_parts(
    query: str, key: str, value: str, *, heads: int, kv_heads: int, head_size: int, interleaved: bool = False
) -> dict[str, list[tuple[int, int]]]:
    """The rows of a fused QKV that are each one's, for `Layout.split`.

    Args:
        query: Name of the queries' part.
        key: Name of the keys' part.
        value: Name of the values' part.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_size: Rows of a head.
        interleaved: Whether each key head follows its queries, and its value head follows it, rather than all
            keys following all queries.

    Raises:
        LayoutError: The key heads do not divide the query heads.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise LayoutError(f"{heads} query heads can't share {kv_heads} key heads evenly")
    groups = kv_heads if interleaved else 1
    lengths = [heads * head_size // groups, *[kv_heads * head_size // groups] * 2]
    bounds = [0, *itertools.accumulate(lengths * groups)]
    ranges = list(itertools.pairwise(bounds))
    return {query: ranges[0::3], key: ranges[1::3], value: ranges[2::3]}


def chunk(ranges: Ranges, parts: int, index: int, factor: int = 1) -> Ranges:
    """The part that one place of a mesh has of some indices."""
    size = sum(b - a for a, b in ranges)
    if factor == 1:
        length = -(-size // parts)
        return _cut(ranges, index * length, (index + 1) * length)
    length = -(-size // factor)
    found = [chunk(_cut(ranges, i * length, (i + 1) * length), parts, index) for i in range(factor)]
    return tuple(r for part in found for r in part)


def boxes_of(ranges: Sequence[Ranges], strides: Shape) -> Iterator[Block]:
    """The blocks of a rank that has some indices of each dimension, packed in one local tensor."""
    placed = [zip(itertools.accumulate([b - a for a, b in r], initial=0), r, strict=False) for r in ranges]
    for corner in itertools.product(*placed):
        shape = tuple(b - a for _, (a, b) in corner)
        offset = dot([position for position, _ in corner], strides)
        yield Block(tuple(a for _, (a, _) in corner), Region(offset, shape, strides))


def mesh_ranges(
    shape: Shape, extents: Shape, coordinate: Shape, splits: Sequence[Split | None]
) -> list[Ranges]:
    """The indices of each dimension that one place of a mesh has; its dimensions split from the left."""
    ranges: list[Ranges] = [((0, n),) if n else () for n in shape]
    for extent, index, split in zip(extents, coordinate, splits, strict=True):
        if split is not None:
            ranges[split.dim] = chunk(ranges[split.dim], extent, index, split.factor)
    return ranges


@lru_cache(4096)
def _sharded(
    shape: Shape, ranks: tuple[int, ...], dim: int, parts: int, padded: int | None
) -> tuple[Share, ...]:
    shares = []
    for i, rank in enumerate(ranks):
        whole = shape if padded is None else (*shape[:dim], padded, *shape[dim + 1 :])
        ranges: list[Ranges] = [((0, n),) if n else () for n in shape]
        held = chunk(((0, whole[dim]),) if whole[dim] else (), parts, i * parts // len(ranks))
        ranges[dim] = _cut(held, 0, max(0, shape[dim] - held[0][0])) if held else ()
        local = (*shape[:dim], _length(held), *shape[dim + 1 :])
        strides = dense_strides(local)
        missing = _length(held) - _length(ranges[dim])
        padding = (*shape[:dim], missing, *shape[dim + 1 :])
        unused = (Region(_length(ranges[dim]) * strides[dim], padding, strides),) if missing else ()
        shares.append(Share(rank, 0, Memory.dense(local, unused), tuple(boxes_of(ranges, strides))))
    return tuple(shares)


@lru_cache(4096)
def _on_mesh(
    shape: Shape, extents: Shape, ranks: tuple[int, ...], splits: tuple[Split | None, ...]
) -> tuple[Share, ...]:
    shares = []
    for rank, coordinate in zip(ranks, itertools.product(*map(range, extents)), strict=True):
        ranges = mesh_ranges(shape, extents, coordinate, splits)
        memory = Memory.dense([_length(r) for r in ranges])
        shares.append(Share(rank, 0, memory, tuple(boxes_of(ranges, memory.strides))))
    return tuple(shares)


@lru_cache(1024)
def _flat_sharded(shapes: tuple[Shape, ...], ranks: tuple[int, ...]) -> tuple[tuple[Share, ...], ...]:
    sizes = [math.prod(shape) for shape in shapes]
    begins = [0, *itertools.accumulate(sizes)]
    length = -(-begins[-1] // len(ranks))
    found = []
    for shape, first, size in zip(shapes, begins, sizes, strict=False):
        shares = []
        for i, rank in enumerate(ranks):
            low, high = i * length, min((i + 1) * length, begins[-1])
            padding = length - max(0, high - low)
            unused = (Region(length - padding, (padding,), (1,)),) if padding else ()
            strides = dense_strides(shape)
            blocks = tuple(
                Block(box.start, Region(dot(box.start, strides) + first - low, box.shape, strides))
                for box in flat_boxes(shape, max(low - first, 0), min(high - first, size))
            )
            shares.append(Share(rank, 0, Memory.dense((length,), unused), blocks))
        found.append(tuple(shares))
    return tuple(found)


def _cut(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The indices at the positions [begin, end)."""
    found, position = [], 0
    for a, b in ranges:
        low, high = max(a, a + begin - position), min(b, a + end - position)
        if low < high:
            found.append((low, high))
        position += b - a
    return tuple(found)


def _length(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


def _flatten(mesh: Nested) -> tuple[Shape, tuple[int, ...]]:
    """The extents of a nested sequence of ranks, and the ranks in order."""
    extents: list[int] = []
    level: list[Any] = [mesh]
    while level and all(isinstance(each, Sequence) and not isinstance(each, str) for each in level):
        if len(lengths := {len(each) for each in level}) > 1:
            raise LayoutError(f"the mesh {mesh!r} is ragged")
        extents += lengths
        level = [inner for each in level for inner in each]
    if not level or not all(isinstance(rank, int) for rank in level) or len(set(level)) != len(level):
        raise LayoutError(f"a mesh has different ranks in equally long lists, not {mesh!r}")
    return tuple(extents), tuple(level)
