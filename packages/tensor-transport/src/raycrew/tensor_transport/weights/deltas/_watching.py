"""Whether tensors still are what was told of them: a publisher sees what is told alone."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch

from raycrew.tensor_transport._bytes import flat_bytes, fold
from raycrew.tensor_transport.errors import SourceChangedError


class _Sight(NamedTuple):
    """A tensor that an iterator gave, and nobody has to hold: where it lies in its storage."""

    name: str
    told: int
    start: int
    end: int
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]

    def is_same(self, storage: torch.UntypedStorage) -> bool:
        """Whether its elements are what was told; those that are not there any more are."""
        if storage.nbytes() < self.end:
            return True
        found = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.place)
        return _is_same(found, self.told)


class Watch:
    """Looks at tensors again: those of a mapping or list in the end, those of an iterator at once, too.

    Of the latter, memory is looked at in the end that somebody still holds, as a model does, but what was
    given again since, as a buffer is that is filled anew.

    Args:
        weights: Where the tensors are from.
    """

    def __init__(self, weights: object) -> None:
        self._is_held = isinstance(weights, Mapping | Sequence)
        self._held: list[tuple[str, torch.Tensor, int]] = []
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, list[_Sight]] = (
            weakref.WeakKeyDictionary()
        )

    def told(self, name: str, tensor: torch.Tensor, told: int) -> None:
        """What was told of a tensor has this fold.

        Raises:
            SourceChangedError: The tensor has another one.
        """
        if self._is_held:
            self._held.append((name, tensor, told))
            return
        if not _is_same(tensor, told):
            refuse([name])
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return
        storage, first = tensor.untyped_storage(), int(tensor.storage_offset())
        reach = int(sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)))
        start, end = first * tensor.itemsize, (first + reach + 1) * tensor.itemsize
        place = (first, tuple(tensor.shape), tensor.stride())
        others = [s for s in self._seen.get(storage, ()) if s.end <= start or s.start >= end]
        self._seen[storage] = [*others, _Sight(name, told, start, end, tensor.dtype, place)]

    def check(self) -> None:
        """Raise SourceChangedError, with their names, if tensors have other elements than was told."""
        changed = [name for name, tensor, told in self._held if not _is_same(tensor, told)]
        for storage, seen in list(self._seen.items()):
            changed += [sight.name for sight in seen if not sight.is_same(storage)]
        if changed:
            refuse(changed)


def refuse(names: Iterable[str]) -> NoReturn:
    """Raise SourceChangedError for tensors of these names."""
    found = tuple(names)
    shown = ", ".join(map(repr, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    error = SourceChangedError(
        f"{len(found)} of the tensors were written to while it was told what changed in them: {shown}; "
        "publish between training steps, or encode a copy of the weights"
    )
    error.names = found
    raise error


def _is_same(tensor: torch.Tensor, told: int) -> bool:
    return fold(flat_bytes(tensor)) == told
