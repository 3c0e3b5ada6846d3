"""What is published: whole tensors, which of them are one, and whether somebody wrote to them meanwhile."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from raycrew.tensor_transport._bytes import FREED, is_freed
from raycrew.tensor_transport.errors import SourceChangedError, UnsupportedTensorError
from raycrew.tensor_transport.weights._publishing.glimpses import (
    Glimpse,
    Held,
    Sight,
    Streamed,
    changed,
    fold,
    has_plain_memory,
    is_wrapper,
    memory_of,
    version_of,
)
from raycrew.tensor_transport.weights._publishing.selection import Select, Selection

Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_DICT_ITEMS: type = type({}.items())


def listed(weights: Weights) -> tuple[Iterable[tuple[str, torch.Tensor]], bool]:
    """The pairs, and whether all tensors are kept alive: those of an iterator are made as it is asked."""
    if isinstance(weights, Mapping):
        return list(weights.items()), True
    return (list(weights), True) if isinstance(weights, Sequence | _DICT_ITEMS) else (weights, False)


def gather_weights(weights: Weights, *, select: Select | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each weight; ranks that do not publish drain it to take part in gathering.

    Args:
        weights: The tensors.
        select: Names, or a predicate: that of the publisher.

    Raises:
        UnsupportedTensorError: A value is no tensor.
        SourceChangedError: At the end: this rank's part of a tensor was written to after it was gathered.
    """
    watch, selection = SourceWatch(), Selection(select=select)
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if selection.wants(name):
            yield name, watch.gather(name, tensor)
    watch.check()


def find_ties(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> the earlier name of the same elements: equal storage, offset, shape, strides and dtype.

    An address means something only as long as its memory is held: the caller keeps all tensors alive until
    the last one was looked at.
    """
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in weights:
        if (place := _place(tensor)) is not None and first.setdefault(place, name) != name:
            ties[name] = first[place]
    return ties


def refuse_without_bytes(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedTensorError for a tensor whose elements do not lie in a memory of its own."""
    if tensor.is_nested:
        kind = "nested"
    elif is_lazy(tensor):
        kind = "lazy"
    elif tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        kind = "quantised"
    elif tensor.device.type == "meta":
        kind = "meta"
    elif is_wrapper(tensor):
        kind = f"wrapping ({type(tensor).__name__})"
    elif is_freed(tensor):
        raise UnsupportedTensorError(f"{name!r}: {FREED}", name=name)
    else:
        return
    raise UnsupportedTensorError(f"{name!r} is a {kind} tensor: it has no plain bytes to send", name=name)


class SourceWatch:
    """Sees whether tensors still are what was taken of them.

    torch counts most writes to a tensor, but not those of fused optimizers, through `.data`, through numpy or
    to inference tensors. So the elements are summed up as well, once in the copy and once in the tensor when
    all were copied: if neither sum nor counter of any tensor differs, then all of them had the copied values
    at one moment, that between the last copy and the first look back.

    Args:
        held: Whether the tensors stay alive and must keep their values until `check`. If not (an iterator may
            make each tensor as it is asked for, in one buffer), each is compared as soon as it was copied,
            too, and nothing is kept for the end: what has gone by then is no part of a model, and neither is
            a buffer that was given under several names with several contents (but parameters always are).
    """

    def __init__(self, *, held: bool = False) -> None:
        self._held = held
        self._taken: list[Glimpse] = []
        self._streamed = Streamed()
        self._versions: dict[str, int | None] = {}

    def passed(self, tensor: object) -> None:
        """The source gives this, and nothing is taken of it."""
        if isinstance(tensor, torch.Tensor) and not self._held:
            self._streamed.passed(memory_of(tensor))

    def gather(self, name: str, tensor: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """A tensor that is about to be copied: a DTensor is gathered (a collective), or its part alone."""
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedTensorError(f"{name!r} is a {type(tensor).__name__}, not a tensor", name=name)
        self.passed(tensor)
        full = getattr(tensor, "full_tensor", None)
        if not callable(full):
            self._versions[name] = version_of(tensor)
            return tensor.detach()
        part = memory_of(tensor)
        if has_plain_memory(part) and is_freed(part):
            raise UnsupportedTensorError(f"{name!r}: {FREED}", name=name)
        self._keep(tensor, self._glimpse(name, tensor, version_of(part), fold(part)))
        found: torch.Tensor = full() if whole else part
        return found.detach()

    def copied(self, name: str, tensor: torch.Tensor, content: torch.Tensor | int) -> None:
        """A copy was made of `tensor`, no DTensor, as `gather` got it, with this `fold`.

        Raises:
            SourceChangedError: Somebody wrote to it meanwhile.
        """
        taken = self._glimpse(name, tensor, self._versions.pop(name), content)
        if not self._held:
            _refuse_changed([taken])
        self._keep(tensor, taken)

    def changing(self, name: str, tensor: torch.Tensor) -> None:
        """What is copied will be made of `tensor`, and have other elements."""
        if not callable(getattr(tensor, "full_tensor", None)):
            self._keep(tensor, self._glimpse(name, tensor, self._versions.pop(name), fold(tensor)))

    def check(self, *, leaves_half: bool = False) -> None:
        """Compare all tensors with what was taken of them; half of the processors may be left to others.

        Raises:
            SourceChangedError: Some were written to; the error names them.
        """
        _refuse_changed([*self._taken, *self._streamed], leaves_half=leaves_half)

    def _glimpse(
        self, name: str, tensor: torch.Tensor, version: int | None, content: torch.Tensor | int
    ) -> Glimpse:
        return Glimpse(name, Held(tensor) if self._held else Sight(tensor), version, content)

    def _keep(self, tensor: torch.Tensor, taken: Glimpse) -> None:
        if self._held or isinstance(tensor, torch.nn.Parameter):
            self._taken.append(taken)
        else:
            self._streamed.add(taken)


def source_changed(names: Sequence[str]) -> SourceChangedError:
    """The error that names what somebody wrote to."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    error = SourceChangedError(
        f"{len(names)} of the tensors were written to while they were published: {shown}; nothing was "
        "published. Publish between training steps, or publish a copy of the weights"
    )
    error.names = tuple(names)
    return error


def _refuse_changed(taken: Sequence[Glimpse], *, leaves_half: bool = False) -> None:
    if names := [glimpse.name for glimpse in changed(taken, leaves_half=leaves_half)]:
        raise source_changed(names)


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What tells which elements a tensor has; None where that can't be told."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
        return None
    if tensor.is_nested or tensor.layout != torch.strided:
        return None
    layout: tuple[Any, ...] = ()
    if hasattr(tensor, "to_local"):
        layout = (tensor.device_mesh, tensor.placements, tuple(tensor.shape))  # type: ignore[attr-defined]
        tensor = memory_of(tensor)
    if tensor.device.type == "meta" or is_wrapper(tensor) or not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    shape = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (tensor.device, storage, *shape, tensor.dtype, tensor.is_conj(), tensor.is_neg(), *layout)
