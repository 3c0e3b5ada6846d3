"""Tensors inside nested objects: replaced by handles, and handles by tensors again."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raycrew.tensor_transport._bytes import check_tensor
from raycrew.tensor_transport._packed import PackedTensor
from raycrew.tensor_transport._ragged import RaggedTensor
from raycrew.tensor_transport._registry import ShardRegistry
from raycrew.tensor_transport._shards import TensorShardInfo
from raycrew.tensor_transport.batch import BatchedDataDict
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.rtensor import RTensor

Leaf = Callable[[Any], Any]


def remotize(
    value: Any,
    registry: ShardRegistry,
    *,
    min_bytes: int = 0,
    step: int | None = None,
    trim: bool = False,
) -> Any:
    """The same object with handles in place of its tensors; they are stored in one batch.

    Walks dicts, lists, tuples, dataclasses and `BatchedDataDict`. Of a ragged column the values become a
    handle (its lengths stay), of a packed column each row's tensor. Tensors without dimensions stay.

    Args:
        value: Any object; it is not changed.
        registry: Where to store.
        min_bytes: Leave smaller tensors as they are.
        step: The lease: `registry.expire(later_step)` releases what is stored here.
        trim: In mappings with a two-dimensional `attention_mask`, do not store columns that are padding in
            every row: leading and trailing columns where the mask is 0, of all tensors of the mask's shape
            in which these columns hold one value. `RTensor.padded` (or `localize(..., pad=True)`) has them
            again.

    Raises:
        UnsupportedTensorError: A tensor has no plain bytes.
    """
    found: list[torch.Tensor] = []
    trims: list[_Trim | None] = []

    def collect(tensor: Any, cut: "_Trim | None") -> Any:
        if not _is_movable(tensor):
            return tensor
        check_tensor(tensor)
        if tensor.nbytes < min_bytes:
            return tensor
        found.append(tensor if cut is None else cut.of(tensor))
        trims.append(cut)
        return _Slot(len(found) - 1)

    skeleton = _walk(value, lambda leaf: collect(leaf, None), _trimming(collect) if trim else None)
    handles = [
        _with_trim(handle, cut)
        for handle, cut in zip(registry.put(found, step=step) if found else [], trims, strict=True)
    ]
    return _walk(skeleton, lambda leaf: handles[leaf.index] if isinstance(leaf, _Slot) else leaf)


def localize(
    value: Any,
    registry: ShardRegistry,
    *,
    pad: bool = False,
    only: Callable[[RTensor], bool] | None = None,
    timeout_s: float | None = 600.0,
    borrow: bool = False,
) -> Any:
    """The same object with tensors in place of its handles, all fetched in one batch.

    Args:
        value: Any object; it is not changed.
        registry: What can read the handles' shards.
        pad: Restore padding that was trimmed when the tensors were stored.
        only: Leave handles alone for which this is false.
        timeout_s: Deadline of the requests.
        borrow: Tensors in place where the backend can, for reading only; see `ShardRegistry.fetch`.

    Raises:
        StaleHandleError: A shard was released, or its owner restarted.
        ShardLostError: An owner died.
        TransportTimeoutError: A deadline passed.
    """
    handles: list[RTensor] = []
    seen: dict[int, int] = {}

    def collect(leaf: Any) -> Any:
        if not isinstance(leaf, RTensor) or (only is not None and not only(leaf)):
            return leaf
        if id(leaf) not in seen:
            seen[id(leaf)] = len(handles)
            handles.append(leaf)
        return _Slot(seen[id(leaf)])

    skeleton = _walk(value, collect)
    if not handles:
        return value
    wanted = [handle.padded() for handle in handles] if pad else handles
    tensors = registry.fetch(wanted, timeout_s=timeout_s, borrow=borrow)
    return _walk(skeleton, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf)


def collect_shards(value: Any) -> list[TensorShardInfo]:
    """The shards of all handles inside an object, each once."""
    shards: dict[str, TensorShardInfo] = {}

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, RTensor):
            shards.update((shard.shard_id, shard) for shard in leaf.shards)
        return leaf

    _walk(value, collect)
    return list(shards.values())


def flatten_shard_ids(value: Any) -> list[str]:
    """The ids of the shards of all handles inside an object, each once."""
    return [shard.shard_id for shard in collect_shards(value)]


def release(value: Any, registry: ShardRegistry) -> None:
    """Give up the shards of all handles inside an object."""
    registry.release(collect_shards(value))


def clear_node(node_id: str, registry: ShardRegistry) -> int:
    """Release everything that is stored on one node; how many shards that were.

    Raises:
        TransportError: No backend of the registry keeps stores by node.
    """
    clearing = [getattr(b, "clear_node", None) for b in registry.backends.values()]
    known = [clear for clear in clearing if clear is not None]
    if not known:
        raise TransportError(f"no backend of {sorted(registry.backends)} keeps stores by node")
    return sum(clear(node_id) for clear in known)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for the tensor or handle of a number, and for a column of a batch."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Trim:
    """The columns that are stored, and what the others hold."""

    start: int
    end: int
    width: int
    pad_value: float | int | bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, self.start : self.end]


def _walk(value: Any, leaf: Leaf, mapping: "Callable[[Mapping[str, Any]], Leaf] | None" = None) -> Any:
    """Rebuild containers with `leaf` applied to everything else; untouched containers stay themselves."""
    if isinstance(value, BatchedDataDict):
        return _walk_batch(value, leaf, mapping)
    if isinstance(value, RaggedTensor | PackedTensor | _Under):
        return _walk_column(value, leaf if mapping is None else mapping({}))
    if isinstance(value, dict):
        for_items = mapping(value) if mapping is not None else leaf
        changed = {k: _walk(v, for_items, mapping) for k, v in value.items()}
        return changed if any(changed[k] is not v for k, v in value.items()) else value
    if isinstance(value, list | tuple):
        items = [_walk(item, leaf, mapping) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | _Slot):
        return _walk_dataclass(value, leaf, mapping)
    return leaf(value)


@dataclasses.dataclass(frozen=True)
class _Under:
    """A batch or a column under way: its parts may be slots, which it would not accept itself."""

    rebuild: Callable[[Any], Any]
    parts: Any


def _walk_batch(
    batch: BatchedDataDict[Any], leaf: Leaf, mapping: "Callable[[Mapping[str, Any]], Leaf] | None"
) -> Any:
    plain = batch.get_dict()
    columns = _walk(plain, leaf, mapping)
    metadata = _walk(batch.metadata, leaf, mapping)
    if columns is plain and metadata is batch.metadata:
        return batch

    def rebuild(parts: tuple[dict[str, Any], dict[str, Any]]) -> BatchedDataDict[Any]:
        rebuilt = copy.copy(batch)
        rebuilt.update({key: column for key, column in parts[0].items() if column is not plain[key]})
        rebuilt.metadata = parts[1]
        return rebuilt

    return _Under(rebuild, (columns, metadata))


def _walk_column(value: "RaggedTensor | PackedTensor | _Under", leaf: Leaf) -> Any:
    """A column of several parts: the values of a ragged one, the tensors of a packed one."""
    if isinstance(value, _Under):
        return value.rebuild(_walk(value.parts, leaf))
    parts = value.values if isinstance(value, RaggedTensor) else value.tensors
    changed = _walk(parts, leaf)
    if changed is parts:
        return value
    if isinstance(value, RaggedTensor):
        lengths = value.lengths
        return _Under(lambda found: RaggedTensor(found, lengths), changed)
    dim = value.dim_to_pack
    return _Under(lambda found: PackedTensor(found, dim), changed)


def _walk_dataclass(value: Any, leaf: Leaf, mapping: "Callable[[Mapping[str, Any]], Leaf] | None") -> Any:
    names = [f.name for f in dataclasses.fields(value) if f.init]
    changed = {name: _walk(getattr(value, name), leaf, mapping) for name in names}
    changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
    return dataclasses.replace(value, **changed) if changed else value


def _is_movable(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.ndim > 0


def _with_trim(handle: RTensor, cut: _Trim | None) -> RTensor:
    if cut is None:
        return handle
    return RTensor(
        dataclasses.replace(handle.shard, column_offset=cut.start, width=cut.width, pad_value=cut.pad_value)
    )


def _trimming(collect: Callable[[Any, _Trim | None], Any]) -> "Callable[[Mapping[str, Any]], Leaf]":
    """For each mapping, a leaf function that trims by the mapping's own attention mask."""

    def for_mapping(mapping: Mapping[str, Any]) -> Leaf:
        mask = mapping.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.any():
            return lambda leaf: collect(leaf, None)
        used = torch.nonzero(mask.any(dim=0)).flatten()
        start, end = int(used[0]), int(used[-1]) + 1
        if (start, end) == (0, mask.shape[1]):
            return lambda leaf: collect(leaf, None)
        return lambda leaf: collect(leaf, _trim_of(leaf, mask, start, end))

    return for_mapping


def _trim_of(leaf: Any, mask: torch.Tensor, start: int, end: int) -> _Trim | None:
    """How to trim a tensor, None where its padding holds more than one value."""
    if not _is_movable(leaf) or leaf.shape != mask.shape:
        return None
    padding = torch.cat([leaf[:, :start], leaf[:, end:]], dim=1)
    value = padding[0, 0]
    if not bool((padding == value).all()):
        return None
    return _Trim(start, end, mask.shape[1], value.item())
