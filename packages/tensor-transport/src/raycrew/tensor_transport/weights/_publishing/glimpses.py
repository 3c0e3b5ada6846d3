"""What was seen of a tensor, to be looked at again without keeping its memory."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from raycrew.tensor_transport._bytes import extent_of, flat_bytes, is_freed, share_out
from raycrew.tensor_transport.protocols import Bytes

_WORD = 8


def work_of(sizes: Iterable[int]) -> int:
    """How many bytes are to be shared out among threads; 0 where torch has several threads of its own."""
    return sum(sizes) if torch.get_num_threads() == 1 else 0


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bytes, as 64-bit words, modulo 2**64: a tensor of no dimension on its device."""
    raw = flat_bytes(tensor)
    if raw.storage_offset() % _WORD:
        raw = raw.clone()
    whole = raw.numel() // _WORD * _WORD
    if (
        whole == raw.numel()
    ):  # As nearly all are: of many small tensors, calls of torch take most of the time.
        return raw.view(torch.int64).sum()
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()


def fold_bytes(raw: Bytes) -> int:
    """The `fold` of a tensor of these bytes, or of a part of it that ends with a word."""
    whole = len(raw) // _WORD * _WORD
    words = int(np.add.reduce(raw[:whole].view(np.int64)))
    return words if whole == len(raw) else words + int(raw[whole:].sum())


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory is this process's part."""
    local = getattr(tensor, "to_local", None)
    part: torch.Tensor = local() if callable(local) else tensor
    return part.detach()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often torch saw a write to the tensor; None where it does not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - there is no other way to ask


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its class says what operations mean: its memory may be nowhere, or mean something else."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in the storage that it names."""
    return not (
        tensor.is_nested
        or tensor.layout != torch.strided
        or tensor.device.type == "meta"
        or is_wrapper(tensor)
        or not tensor.numel()
    )


class Held:
    """A tensor that stays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def memory(self) -> torch.Tensor | None:
        """Its elements now; None where they were freed."""
        memory = memory_of(self._tensor)
        return None if has_plain_memory(memory) and is_freed(memory) else memory

    def version(self) -> int | None:
        """What torch counts now."""
        return version_of(memory_of(self._tensor))


class Sight:
    """A tensor for as long as somebody else holds it, or at least its storage.

    The counter of writes is shared by a tensor and what is detached from it; so a detached tensor that is
    then given an empty storage counts on, and keeps no memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        self._tensor = weakref.ref(tensor)
        self._is_plain = has_plain_memory(memory)
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        if self._is_plain:
            self.start, self.end = extent_of(memory)
            self._storage = weakref.ref(memory.untyped_storage())
            self._place = (memory.storage_offset(), tuple(memory.shape), memory.stride())
            self._kind = (memory.dtype, memory.device, memory.is_conj(), memory.is_neg())
        self._counter = _counter_of(memory)

    def memory(self) -> torch.Tensor | None:
        """Its elements now; None where nobody holds them any more."""
        tensor = self._tensor()
        if not self._is_plain:
            return None if tensor is None else memory_of(tensor)
        storage = self.storage()
        if tensor is not None:
            memory = memory_of(tensor)
            end = self.end if memory.untyped_storage() is storage else extent_of(memory)[1]
            return memory if _is_there(memory.untyped_storage(), end) else None
        return None if storage is None or not _is_there(storage, self.end) else self._over(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """Where its elements lie; None where nobody holds that, or its class hides it."""
        return None if self._storage is None else self._storage()

    def version(self) -> int | None:
        """What torch counts now."""
        return None if self._counter is None else version_of(self._counter)

    def _over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        dtype, device, is_conj, is_neg = self._kind
        found = torch.empty(0, dtype=dtype, device=device).set_(storage, *self._place)
        found = found.conj() if is_conj else found
        return -found if is_neg else found


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A tensor as it was when it was taken."""

    name: str
    source: Held | Sight
    version: int | None
    content: torch.Tensor | int


def changed(glimpses: Sequence[Glimpse], *, leaves_half: bool = False) -> list[Glimpse]:
    """Those whose tensors are no longer what was seen of them; what nobody holds any more is as it was."""
    seen = [(g, g.source.memory()) for g in glimpses]
    present = [(g, memory) for g, memory in seen if memory is not None]
    freed = [g for g, memory in seen if memory is None and isinstance(g.source, Held)]
    found = _values(_folds([memory for _, memory in present], leaves_half=leaves_half))
    before = _values([g.content for g, _ in present])
    return freed + [
        glimpse
        for (glimpse, _), old, new in zip(present, before, found, strict=True)
        if old != new or glimpse.version != glimpse.source.version()
    ]


def _folds(memories: Sequence[torch.Tensor], *, leaves_half: bool) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    on_cpu = [number for number, memory in enumerate(memories) if memory.is_cpu]

    def take(number: int) -> None:
        found[number] = fold(memories[number])

    work = work_of(memories[number].nbytes for number in on_cpu)
    share_out(on_cpu, work, take, leaves_half=leaves_half)
    return [found[number] if number in found else fold(memory) for number, memory in enumerate(memories)]


@dataclass(slots=True)
class _Yields:
    """What an iterator gave of one storage, and whether it fills it again and again."""

    glimpses: list[Glimpse] = field(default_factory=list)
    start: int = 0
    end: int = 0
    is_buffer: bool = False


class Streamed:
    """What an iterator gave, by storage: memory that it fills anew for a later tensor may change.

    Such a buffer shows when elements that were given once are given again, and are others by then. Where they
    are the same, two names are tied. Storages are not kept; what was seen of one is forgotten with it.
    """

    def __init__(self) -> None:
        self._storages: weakref.WeakKeyDictionary[torch.UntypedStorage, _Yields] = weakref.WeakKeyDictionary()

    def passed(self, memory: torch.Tensor) -> None:
        """The iterator gives this memory."""
        if not has_plain_memory(memory) or (yields := self._storages.get(memory.untyped_storage())) is None:
            return
        start, end = extent_of(memory)
        if yields.is_buffer or end <= yields.start or start >= yields.end:
            return
        shared = [g for g in yields.glimpses if _overlaps(g.source, start, end)]
        if changed(shared):
            yields.is_buffer = True
            yields.glimpses.clear()

    def add(self, glimpse: Glimpse) -> None:
        """Remember what was seen of a tensor."""
        sight = glimpse.source
        if isinstance(sight, Held) or (storage := sight.storage()) is None:
            return
        yields = self._storages.setdefault(storage, _Yields(start=sight.start, end=sight.end))
        if not yields.is_buffer:
            yields.start, yields.end = min(sight.start, yields.start), max(sight.end, yields.end)
            yields.glimpses.append(glimpse)

    def __iter__(self) -> Iterator[Glimpse]:
        """What must still be as it was seen."""
        for yields in self._storages.values():
            yield from yields.glimpses


def _overlaps(source: Held | Sight, start: int, end: int) -> bool:
    return isinstance(source, Sight) and source.start < end and source.end > start


def _is_there(storage: torch.UntypedStorage, end: int) -> bool:
    """Whether a storage still has these bytes: sharded models free gathered ones by making them empty."""
    return storage.nbytes() >= end


def _counter_of(memory: torch.Tensor) -> torch.Tensor | None:
    """A tensor that counts the writes to another one, and does not keep its memory."""
    if memory.is_inference() or is_wrapper(memory):
        return None
    if torch.is_inference_mode_enabled():  # What takes an inference tensor's data counts no longer.
        with torch.inference_mode(False):
            return _counter_of(memory)
    counter = memory.detach()
    counter.data = torch.empty(0, dtype=memory.dtype, device=memory.device)
    return counter


def _values(folds: Sequence[torch.Tensor | int]) -> list[int]:
    """The values of folds on any devices, with one transfer from each."""
    found = [0 if isinstance(value, torch.Tensor) else value for value in folds]
    tensors = [(i, value) for i, value in enumerate(folds) if isinstance(value, torch.Tensor)]
    for device in {value.device for _, value in tensors}:
        here = [(i, value) for i, value in tensors if value.device == device]
        for (i, _), value in zip(here, torch.stack([value for _, value in here]).tolist(), strict=True):
            found[i] = value
    return [value % 2**64 for value in found]
