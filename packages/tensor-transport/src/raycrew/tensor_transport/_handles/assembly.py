"""From a handle to the reads of its shards, and from what they give to one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raycrew.tensor_transport._bytes import copy_bytes, fresh_tensor, raw
from raycrew.tensor_transport._rows import ShardRead, ShardRows, TensorShardInfo, dtype_name
from raycrew.tensor_transport.rtensor import RTensor


def check_targets(handles: Sequence[RTensor], targets: Sequence[torch.Tensor | None]) -> None:
    """Raise ValueError unless there is a tensor to fill of the right shape and dtype, or None, for each."""
    if len(targets) != len(handles):
        raise ValueError(f"{len(targets)} tensors in `into` for {len(handles)} handles")
    for handle, target in zip(handles, targets, strict=True):
        if target is not None and (target.shape != handle.shape or target.dtype != handle.dtype):
            raise ValueError(f"`into` is {_kind(target)}, the handle {_kind(handle)}")
        if target is not None and (target.is_meta or target.is_conj() or target.is_neg()):
            raise ValueError("`into` is a meta tensor, or a lazy conjugate or negative: it can't be filled")


_EVERY_ROW = ShardRows(0, slice(None), slice(None))


def _kind(tensor: torch.Tensor | RTensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read of each shard of a handle, and the memory for it (None: what the backend gives)."""

    handle: RTensor
    out: torch.Tensor | None
    parts: list[tuple[ShardRows, ShardRead]]


def plan_reads(handle: RTensor, target: torch.Tensor | None, direct: bool) -> Plan:
    """What to read for a handle; `direct` lets backends write into the result."""
    if target is None and handle.is_whole:
        return Plan(handle, None, [(_EVERY_ROW, ShardRead(handle.shards[0]))])
    needed = handle.view.by_shard()
    out = target
    if out is None and len(needed) != 1:
        out = fresh_tensor(handle.shape, handle.dtype)
    parts = []
    for rows in needed:
        shard = handle.shards[rows.shard]
        whole = isinstance(rows.rows, slice) and rows.rows == slice(0, shard.rows)
        columns = _stored_columns(handle, shard)
        into = _region(handle, shard, rows, out) if direct and out is not None else None
        parts.append((rows, ShardRead(shard, None if whole else rows.rows, columns, into)))
    return Plan(handle, out, parts)


def _region(
    handle: RTensor, shard: TensorShardInfo, rows: ShardRows, out: torch.Tensor
) -> torch.Tensor | None:
    """Where a part belongs, if that is one run of memory."""
    if rows.repeats is not None or not isinstance(rows.positions, slice):
        return None
    if handle.ndim > 1 and not _covers(handle, shard):
        return None
    region = out[rows.positions] if handle.ndim else out
    return region if region.is_contiguous() and region.device.type == "cpu" else None


def _covers(handle: RTensor, shard: TensorShardInfo) -> bool:
    """Whether a shard has all columns of a handle."""
    return shard.columns[0] <= handle.columns_range[0] and handle.columns_range[1] <= shard.columns[1]


def _stored_columns(handle: RTensor, shard: TensorShardInfo) -> tuple[int, int] | None:
    if handle.ndim < 2 or handle.columns_range == shard.columns:
        return None
    start, end = (
        max(handle.columns_range[0], shard.columns[0]),
        min(handle.columns_range[1], shard.columns[1]),
    )
    return (start - shard.column_offset, max(start, end) - shard.column_offset)


def assemble(
    plan: Plan, parts: Sequence[tuple[ShardRows, ShardRead, torch.Tensor, bool]], borrow: bool
) -> torch.Tensor:
    """Put the parts of one handle where they belong."""
    handle, out = plan.handle, plan.out
    if out is None:
        rows, _, tensor, own = parts[0]
        straight = rows.repeats is None and isinstance(rows.positions, slice)
        if (own or borrow) and straight and (rows is _EVERY_ROW or tensor.shape == handle.shape):
            return tensor
        out = fresh_tensor(handle.shape, handle.dtype)
    for rows, read, tensor, _ in parts:
        if tensor is not read.into:
            _place(handle, read.shard, rows, tensor, out)
    return out


def _place(
    handle: RTensor, shard: TensorShardInfo, rows: ShardRows, tensor: torch.Tensor, out: torch.Tensor
) -> None:
    tensor, out = raw(tensor), raw(out.detach())
    if rows.repeats is not None:
        tensor = tensor[torch.from_numpy(rows.repeats)]
    if not handle.ndim:
        out.copy_(tensor)
        return
    where = rows.positions if isinstance(rows.positions, slice) else torch.from_numpy(rows.positions)
    if not isinstance(where, slice):
        tensor = tensor.to(out.device)  # Slices are copied from device to device, numbered rows are not.
    if handle.ndim == 1 or tensor.shape[1] == out.shape[1]:
        _write(out, where, tensor)
        return
    first = max(0, shard.column_offset - handle.columns_range[0])
    last = first + tensor.shape[1]
    padding = raw(torch.full((1,), 0 if shard.pad_value is None else shard.pad_value, dtype=handle.dtype))
    out[where, :first] = out[where, last:] = padding.to(out.device)
    out[where, first:last] = tensor


def _write(out: torch.Tensor, where: slice | torch.Tensor, tensor: torch.Tensor) -> None:
    """Rows into `out`; unbroken memory is copied faster by numpy, and in threads, than by torch."""
    if not isinstance(where, slice):
        out[where] = tensor
        return
    part = out[where]
    if part.is_contiguous() and tensor.is_contiguous() and part.numel() and part.device.type == "cpu":
        copy_bytes(_raw(part), _raw(tensor))
    else:
        part.copy_(tensor)


def _raw(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
