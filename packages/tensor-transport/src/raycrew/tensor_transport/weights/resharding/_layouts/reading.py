"""The layout of what one rank really holds: plain tensors, and DTensors on any mesh."""

from collections.abc import Mapping
from typing import Any

import torch

from raycrew.tensor_transport._bytes import is_plain
from raycrew.tensor_transport.errors import LayoutError, UnsupportedTensorError
from raycrew.tensor_transport.weights._update import order_of
from raycrew.tensor_transport.weights.resharding._layouts.boxes import Block, Region, Shape
from raycrew.tensor_transport.weights.resharding._layouts.builders import Split, boxes_of, mesh_ranges
from raycrew.tensor_transport.weights.resharding._layouts.layout import (
    Layout,
    Memory,
    Share,
    TensorLayout,
    interned,
)

_Places = dict[Any, tuple[Share, ...]]


def layout_of(
    state: Mapping[str, torch.Tensor], *, rank: int | None = None, skip_tied: bool = False
) -> Layout:
    """What this rank holds; `join_layouts` makes one layout of those of all ranks.

    A DTensor's boxes follow from its placements on its mesh (`Shard`, `Replicate`, `_StridedShard`), a plain
    tensor is held whole. No collective is called, no byte is read: meta tensors will do.

    Args:
        state: A state dict, or any tensors by name.
        rank: The number of this rank within its group: that of `torch.distributed` unless given, 0 without.
        skip_tied: Leave out a tensor of the very elements of an earlier one, in any shape: a receiver fills
            them once.

    Raises:
        LayoutError: A placement can't be told as boxes, as `Partial`: nobody holds the values then.
        UnsupportedTensorError: A value is no strided tensor with plain bytes.
    """
    rank = _own_rank() if rank is None else rank
    known: _Places = {}
    seen: set[Any] = set()
    found: dict[str, TensorLayout] = {}
    for name, tensor in state.items():
        local = local_tensor(name, tensor)
        place = place_of(local)
        if skip_tied and place is not None and place in seen:
            continue
        seen.add(place)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        found[name] = TensorLayout(shape, dtype, _shares(name, tensor, local, rank, known))
    return Layout(found)


def local_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory is this rank's part.

    Raises:
        UnsupportedTensorError: It has no plain bytes.
    """
    part = getattr(tensor, "to_local", None)
    if callable(part):
        with torch.no_grad():
            local: Any = part()
    else:
        local = tensor
    if not isinstance(local, torch.Tensor) or not (is_plain(local) or local.is_meta):
        kind = type(local).__name__
        raise UnsupportedTensorError(f"{name!r} is a {kind} without plain bytes of its own", name=name)
    return local.detach()


def place_of(local: torch.Tensor) -> Any:
    """What tells which elements a tensor has, whatever its shape; None where it has none, or no memory."""
    if local.is_meta or not local.numel():
        return None
    reading = (local.dtype, local.is_conj(), local.is_neg())
    return local.device, local.data_ptr(), order_of(local.shape, local.stride()), reading


def _shares(
    name: str, tensor: torch.Tensor, local: torch.Tensor, rank: int, known: _Places
) -> tuple[Share, ...]:
    mesh: Any = getattr(tensor, "device_mesh", None)
    placements = getattr(tensor, "placements", ())
    shape, memory = tuple(tensor.shape), (tuple(local.shape), local.stride())
    key = (shape, memory, id(mesh), placements)
    if key not in known:
        known[key] = interned(_read(name, shape, Memory(*memory), rank, mesh, placements))
    return known[key]


def _read(
    name: str, shape: Shape, memory: Memory, rank: int, mesh: Any, placements: tuple[Any, ...]
) -> tuple[Share, ...]:
    if mesh is None:
        blocks = (Block((0,) * len(shape), Region(0, shape, memory.strides)),) if memory.size else ()
        return (Share(rank, 0, memory, blocks),)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    splits = [_split(name, placement) for placement in placements]
    ranges = mesh_ranges(shape, tuple(mesh.shape), tuple(coordinate), splits)
    expected = tuple(sum(b - a for a, b in r) for r in ranges)
    if expected != memory.shape:
        raise LayoutError(
            f"rank {rank} has {list(memory.shape)} of {name!r}, where {placements} of shape {list(shape)} on "
            f"a mesh of {list(mesh.shape)} gives it {list(expected)}: it is padded, or unevenly distributed",
            tensor=name,
        )
    return (Share(rank, 0, memory, tuple(boxes_of(ranges, memory.strides))),)


def _split(name: str, placement: Any) -> Split | None:
    if placement.is_partial():
        raise LayoutError(
            f"{name!r} is placed as {placement}: its values are sums that no rank holds; "
            "redistribute() it to Shard or Replicate first",
            tensor=name,
        )
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise LayoutError(f"{name!r} is placed as {placement}, which is not known", tensor=name)
    return Split(dim, int(getattr(placement, "split_factor", 1)))


def _own_rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
