"""Layouts whose parts share a parameter on each rank: fused QKV, gate and up, stacked experts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raycrew.tensor_transport.errors import LayoutError
from raycrew.tensor_transport.weights.resharding._layouts.boxes import (
    Block,
    Region,
    Shape,
    dense_strides,
    dot,
)
from raycrew.tensor_transport.weights.resharding._layouts.layout import Memory, Share, TensorLayout, interned

_Groups = Sequence[Mapping[str, TensorLayout]]


def fused(parts: Mapping[str, TensorLayout], parameter: str, dim: int = 0) -> dict[str, TensorLayout]:
    """Tensors whose parts on each rank lie behind each other along `dim` of one parameter: QKV, gate and up.

    Args:
        parts: Name -> where it would be if it had a parameter of its own.
        parameter: Name of the parameter on each rank.
        dim: Dimension along which the parts follow each other.

    Raises:
        LayoutError: On some rank the parts do not fit each other, or are not contiguous; their dtypes differ.
    """
    return _fuse([{name: part} for name, part in parts.items()], parameter, dim, stack=False)


def stacked(groups: _Groups, parameter: str) -> dict[str, TensorLayout]:
    """Parameters of one shape stacked along a new first dimension on each rank, as the experts of a layer.

    Args:
        groups: For each entry of that dimension the tensors in it: one, or the parts of a `fused` one. A rank
            stacks those that it holds.
        parameter: Name of the parameter on each rank.

    Raises:
        LayoutError: On some rank the shapes differ, or something is not contiguous; the dtypes differ.
    """
    return _fuse(groups, parameter, 0, stack=True)


def _fuse(groups: _Groups, parameter: str, dim: int, *, stack: bool) -> dict[str, TensorLayout]:
    names = [name for group in groups for name in group]
    if len(names) != len(set(names)):
        raise LayoutError(f"a tensor is named twice among the parts of {parameter!r}", tensor=parameter)
    if len(dtypes := {tensor.dtype for group in groups for tensor in group.values()}) > 1:
        raise LayoutError(
            f"the parts of {parameter!r} have the dtypes {', '.join(sorted(dtypes))}: a parameter has one",
            tensor=parameter,
        )
    shares: dict[str, list[Share]] = {name: [] for name in names}
    held = [_by_rank(parameter, group) for group in groups]
    for rank in sorted({rank for members in held for rank in members}):
        members = [found[rank] for found in held if rank in found]
        memories = [next(iter(member.values())).memory for member in members]
        whole, begins = _fused_shape(parameter, rank, [m.shape for m in memories], dim, stack=stack)
        unused = tuple(
            _moved(region, memory, whole, begin, dim)
            for memory, begin in zip(memories, begins, strict=True)
            for region in memory.unused
        )
        for member, memory, begin in zip(members, memories, begins, strict=True):
            for name, share in member.items():
                blocks = tuple(
                    Block(b.start, _moved(b.region, memory, whole, begin, dim)) for b in share.blocks
                )
                shares[name].append(Share(rank, 0, Memory.dense(whole, unused), blocks))
    return {
        name: replace(tensor, shares=interned(tuple(shares[name])), parameters=(parameter,))
        for group in groups
        for name, tensor in group.items()
    }


def _by_rank(parameter: str, group: Mapping[str, TensorLayout]) -> dict[int, dict[str, Share]]:
    """Rank -> what it holds of the tensors of one entry, all of it in one contiguous parameter."""
    found: dict[int, dict[str, Share]] = {}
    for name, tensor in group.items():
        for share in tensor.shares:
            member = found.setdefault(share.rank, {})
            known = next(iter(member.values()), share).memory
            if name in member or share.memory != known or known.strides != dense_strides(known.shape):
                raise LayoutError(
                    f"{name!r} can't be a part of {parameter!r}: on rank {share.rank} it lies in several "
                    "parameters, or in one that is not contiguous",
                    tensor=name,
                )
            member[name] = share
    return found


def _fused_shape(
    parameter: str, rank: int, shapes: list[Shape], dim: int, *, stack: bool
) -> tuple[Shape, list[int]]:
    """The local shape of a fused parameter, and where each part begins in its memory."""
    first = shapes[0]
    if not stack and not 0 <= dim < len(first):
        raise LayoutError(
            f"{parameter!r} has no dimension {dim} along which parts could lie", tensor=parameter
        )
    rests = {(len(shape), shape if stack else (*shape[:dim], *shape[dim + 1 :])) for shape in shapes}
    if len(rests) > 1:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        alike = "have one shape" if stack else f"differ in the length of dimension {dim} alone"
        raise LayoutError(
            f"the parts of {parameter!r} on rank {rank} have the shapes {listed}: they do not fit each "
            f"other; let them {alike}",
            tensor=parameter,
        )
    lengths = [1 if stack else shape[dim] for shape in shapes]
    whole = (len(shapes), *first) if stack else (*first[:dim], sum(lengths), *first[dim + 1 :])
    step = dense_strides(whole)[dim]
    return whole, [sum(lengths[:i]) * step for i in range(len(shapes))]


def _moved(region: Region, memory: Memory, whole: Shape, begin: int, dim: int) -> Region:
    """A region of a part's memory, as it lies in the fused parameter."""
    if dim == 0:  # contiguous parts follow each other in memory as well
        return Region(region.offset + begin, region.shape, region.strides)
    if region.strides != memory.strides:
        raise LayoutError(
            f"a flat part can't lie in dimension {dim} of a fused parameter: only in the first one"
        )
    strides, left, index = dense_strides(whole), region.offset, []
    for stride in memory.strides:
        position, left = divmod(left, stride)
        index.append(position)
    return Region(begin + dot(index, strides), region.shape, strides)
