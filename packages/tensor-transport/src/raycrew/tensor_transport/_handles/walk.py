"""Tensors inside nested objects: replaced by handles, and handles by tensors again."""

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raycrew.tensor_transport._bytes import check_tensor
from raycrew.tensor_transport._columns import PackedTensor, RaggedTensor
from raycrew.tensor_transport._handles.registry import ShardRegistry
from raycrew.tensor_transport._rows import TensorShardInfo
from raycrew.tensor_transport.batch import BatchedDataDict
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import HandleReader
from raycrew.tensor_transport.rtensor import RTensor, without_registry

Leaf = Callable[[Any, torch.Tensor | None], Any]
"""What to put in place of anything that is no container; it also gets the mask of the mapping around it."""


def remotize(
    value: Any,
    registry: ShardRegistry,
    *,
    min_bytes: int = 0,
    only: Callable[[torch.Tensor], bool] | None = None,
    step: int | None = None,
    trim: bool = False,
    replicas: Sequence[str] = (),
) -> Any:
    """The same object with handles in place of its tensors; they are stored in one batch, each once.

    Walks dicts, lists, tuples, dataclasses and `BatchedDataDict`. Of a ragged column the values become a
    handle (its lengths stay), of a packed column each row's tensor. Tensors without dimensions stay.

    Args:
        value: Any object; it is not changed.
        registry: Where to store.
        min_bytes: Leave smaller tensors as they are.
        only: Leave tensors alone for which this is false.
        step: The lease: `registry.expire(later_step)` releases what is stored here.
        trim: In mappings with a two-dimensional `attention_mask`, do not store columns that are padding in
            every row: leading and trailing columns where the mask is 0, of all tensors whose first two
            dimensions are the mask's. Nothing of a mapping is trimmed where one of these tensors stays as
            it is or holds more than one value there, so that their widths are equal. `RTensor.padded`
            (or `localize(..., pad=True)`) has the columns again.
        replicas: Schemes of backends that keep a copy each, read where the first place is lost.

    Raises:
        UnsupportedTensorError: A tensor has no plain bytes.
        ContainsItselfError: A container contains itself.
    """
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    numbers: dict[tuple[int, int], int] = {}
    uneven: set[int] = set()  # the masks of mappings in which a tensor keeps its padding

    def collect(leaf: Any, mask: torch.Tensor | None) -> Any:
        moves = _is_movable(leaf) and (only is None or only(leaf))
        if moves:
            check_tensor(leaf, f"tensor of shape {list(leaf.shape)}")
        if moves and leaf.nbytes >= min_bytes:
            if numbers.setdefault((id(leaf), id(mask)), len(found)) == len(found):
                found.append((leaf, mask))
        elif mask is not None and _is_masked(leaf, mask):
            uneven.add(id(mask))
        return leaf

    _Walk(collect, masks=trim).of(value)
    if not found:
        return value
    cuts = _cuts(found, uneven)
    parts = [leaf if cut is None else cut.of(leaf) for (leaf, _), cut in zip(found, cuts, strict=True)]
    stored = registry.put(parts, step=step, replicas=replicas)
    handles = [_with_trim(handle, cut) for handle, cut in zip(stored, cuts, strict=True)]

    def replace(leaf: Any, mask: torch.Tensor | None) -> Any:
        number = numbers.get((id(leaf), id(mask)))
        return leaf if number is None else handles[number]

    return _Walk(replace, masks=trim).of(value)


def localize(
    value: Any,
    registry: ShardRegistry | None = None,
    *,
    pad: bool = False,
    only: Callable[[RTensor], bool] | None = None,
    timeout_s: float | None = 600.0,
    borrow: bool = False,
) -> Any:
    """The same object with tensors in place of its handles, all fetched in one batch.

    Args:
        value: Any object; it is not changed.
        registry: What can read the handles' shards; by default each handle is read through the registry that
            it came with, see `RTensor.localize`.
        pad: Restore padding that was trimmed when the tensors were stored.
        only: Leave handles alone for which this is false.
        timeout_s: Deadline of the requests.
        borrow: Tensors in place where the backend can, for reading only; see `ShardRegistry.fetch`.

    Raises:
        TransportError: A handle came without a registry, and none is given.
        StaleHandleError: A shard was released, or its owner restarted.
        ShardLostError: An owner died.
        TransportTimeoutError: A deadline passed.
        ContainsItselfError: A container contains itself.
    """
    handles: dict[int, RTensor] = {}

    def collect(leaf: Any, _: torch.Tensor | None) -> Any:
        if isinstance(leaf, RTensor) and (only is None or only(leaf)):
            handles[id(leaf)] = leaf
        return leaf

    _Walk(collect).of(value)
    if not handles:
        return value
    by_reader: dict[HandleReader, list[int]] = defaultdict(list)
    for number, handle in handles.items():
        reader = handle.registry if registry is None else registry
        if reader is None:
            raise without_registry(handle)
        by_reader[reader].append(number)
    tensors: dict[int, torch.Tensor] = {}
    for reader, numbers in by_reader.items():
        wanted = [handles[number].padded() if pad else handles[number] for number in numbers]
        found = reader.fetch(wanted, timeout_s=timeout_s, borrow=borrow)
        tensors.update(zip(numbers, found, strict=True))
    return _Walk(lambda leaf, _: tensors.get(id(leaf), leaf)).of(value)


def collect_shards(value: Any) -> list[TensorShardInfo]:
    """The shards of all handles inside an object, each once."""
    shards: dict[str, TensorShardInfo] = {}

    def collect(leaf: Any, _: torch.Tensor | None) -> Any:
        if isinstance(leaf, RTensor):
            shards.update((shard.shard_id, shard) for shard in leaf.shards)
        return leaf

    _Walk(collect).of(value)
    return list(shards.values())


def flatten_shard_ids(value: Any) -> list[str]:
    """The ids of the shards of all handles inside an object, each once."""
    return [shard.shard_id for shard in collect_shards(value)]


def release(value: Any, registry: ShardRegistry) -> None:
    """Give up the shards of all handles inside an object."""
    registry.release(collect_shards(value))


def clear_node(node_id: str, registry: ShardRegistry) -> int:
    """Release everything that is stored on one node; how many shards that were.

    Args:
        node_id: As shards name it: a Ray node, the "host:port" of a server, a machine with shared memory.
        registry: Its backends that keep a store there are cleared.

    Raises:
        TransportError: No backend of the registry keeps a store on that node.
    """
    stores = {scheme: list(getattr(b, "node_ids", ())) for scheme, b in registry.backends.items()}
    clearing: list[Any] = [registry.backends[scheme] for scheme, nodes in stores.items() if node_id in nodes]
    if not clearing:
        known = "; ".join(f"{scheme}: {', '.join(nodes) or 'no node'}" for scheme, nodes in stores.items())
        raise TransportError(f"no backend keeps a store on node {node_id!r}; they keep some on {known}")
    return sum(backend.clear_node(node_id) for backend in clearing)


class ContainsItselfError(TransportError, ValueError):
    """A container contains itself: it can't be rebuilt with other tensors."""


_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


class _Walk:
    """Rebuilds containers with a function applied to everything in them.

    Containers without a change stay themselves, and one in two places stays one. With `masks`, the function
    gets the two-dimensional `attention_mask` of the mapping that it is in.
    """

    def __init__(self, leaf: Leaf, *, masks: bool = False) -> None:
        self._leaf, self._masks = leaf, masks
        self._open: set[int] = set()
        self._done: dict[tuple[int, int], tuple[Any, Any]] = {}  # with what they replace: ids stay theirs

    def of(self, value: Any, mask: torch.Tensor | None = None) -> Any:
        """A value with what is in it replaced."""
        if type(value) in _PLAIN:
            return value
        if not isinstance(value, dict | list | tuple | BatchedDataDict | RaggedTensor | PackedTensor) and (
            isinstance(value, type) or not dataclasses.is_dataclass(value)
        ):
            return self._leaf(value, mask)
        key = (id(value), id(mask))
        if key in self._done:
            return self._done[key][1]
        if id(value) in self._open:
            raise ContainsItselfError(f"a {type(value).__name__} contains itself")
        self._open.add(id(value))
        rebuilt = self._rebuilt(value, mask)
        self._open.remove(id(value))
        self._done[key] = (value, rebuilt)
        return rebuilt

    def _rebuilt(self, value: Any, mask: torch.Tensor | None) -> Any:
        match value:
            case BatchedDataDict():
                return self._batch(value, mask)
            case RaggedTensor():
                values = self.of(value.values, mask)
                return value if values is value.values else RaggedTensor(values, value.lengths)
            case PackedTensor():
                tensors = self.of(value.tensors, mask)
                return value if tensors is value.tensors else PackedTensor(tensors, value.dim_to_pack)
            case dict():
                changed = self._items(value, mask)
                return _updated(value, changed) if changed else value
            case list() | tuple():
                return self._sequence(value, mask)
        return self._dataclass(value, mask)

    def _items(self, mapping: Mapping[Any, Any], mask: torch.Tensor | None) -> dict[Any, Any]:
        """The items that change."""
        if _PLAIN.issuperset(map(type, mapping.values())):
            return {}
        if self._masks:
            mask = _mask_of(mapping)
        items = ((key, item, self.of(item, mask)) for key, item in mapping.items())
        return {key: new for key, item, new in items if new is not item}

    def _batch(self, batch: BatchedDataDict[Any], mask: torch.Tensor | None) -> Any:
        columns, metadata = self._items(batch.get_dict(), mask), self.of(batch.metadata, mask)
        if not columns and metadata is batch.metadata:
            return batch
        rebuilt = copy.copy(batch)
        rebuilt.update(columns)
        rebuilt.metadata = metadata
        return rebuilt

    def _sequence(self, value: Any, mask: torch.Tensor | None) -> Any:
        if _PLAIN.issuperset(map(type, value)):
            return value
        items = [self.of(item, mask) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _dataclass(self, value: Any, mask: torch.Tensor | None) -> Any:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        changed = {name: new for name, old in fields.items() if (new := self.of(old, mask)) is not old}
        if not changed:
            return value
        twin = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(twin, name, new)  # A frozen one refuses to, and `__init__` may do anything.
        return twin


def _updated(mapping: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of the same class, in the same order."""
    twin = copy.copy(mapping)
    twin.update(changed)
    return twin


@dataclasses.dataclass(frozen=True)
class _Trim:
    """The columns that are stored, and what the others hold."""

    start: int
    end: int
    width: int
    pad_value: float | int | bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, self.start : self.end]

    def noted(self, shard: TensorShardInfo) -> TensorShardInfo:
        return dataclasses.replace(
            shard, column_offset=self.start, width=self.width, pad_value=self.pad_value
        )


def _is_movable(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.ndim > 0


def _with_trim(handle: RTensor, cut: _Trim | None) -> RTensor:
    if cut is None:
        return handle
    shard = cut.noted(handle.shard)
    noted = RTensor(dataclasses.replace(shard, replicas=tuple(map(cut.noted, shard.replicas))))
    return noted.with_registry(handle.registry)


def _mask_of(mapping: Mapping[Any, Any]) -> torch.Tensor | None:
    mask = mapping.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None


def _is_masked(leaf: Any, mask: torch.Tensor) -> bool:
    return isinstance(leaf, torch.Tensor | RTensor) and tuple(leaf.shape[:2]) == tuple(mask.shape)


def _cuts(found: Sequence[tuple[torch.Tensor, torch.Tensor | None]], uneven: set[int]) -> list[_Trim | None]:
    """How to trim each tensor: all of one mask alike, or none of them."""
    used = {id(mask): _used(mask) for _, mask in found if mask is not None}
    cuts: list[_Trim | None] = []
    for leaf, mask in found:
        masked = mask is not None and _is_masked(leaf, mask) and id(mask) not in uneven
        cuts.append(_trim_of(leaf, *used[id(mask)]) if masked else None)
        if masked and cuts[-1] is None:
            uneven.add(id(mask))
    return [None if id(mask) in uneven else cut for cut, (_, mask) in zip(cuts, found, strict=True)]


def _used(mask: torch.Tensor) -> tuple[int, int]:
    """The first column that some row uses, and the one after the last; all where none is used."""
    used = torch.nonzero(mask.any(dim=0)).flatten()
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, mask.shape[1])


def _trim_of(tensor: torch.Tensor, start: int, end: int) -> _Trim | None:
    """How to trim a tensor; None where there is no padding, or it holds more than one value."""
    padding = torch.cat([tensor[:, :start], tensor[:, end:]], dim=1)
    if not padding.numel():
        return None
    value = padding.flatten()[0]
    if not bool((padding == value).all()):
        return None
    return _Trim(start, end, tensor.shape[1], _of_one_sign(value.item(), padding))


def _of_one_sign(value: float | int | bool, padding: torch.Tensor) -> float | int | bool:
    """A value that all of some padding equals: 0.0 where there are zeros of both signs."""
    is_negative = isinstance(value, float) and not value and math.copysign(1.0, value) < 0
    return 0.0 if is_negative and not bool(padding.float().signbit().all()) else value
