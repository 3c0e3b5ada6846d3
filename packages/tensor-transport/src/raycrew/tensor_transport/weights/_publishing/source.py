"""What is published: whole tensors, which of them are one, and whether somebody wrote to them meanwhile."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from raycrew.tensor_transport.errors import SourceChangedError, UnsupportedTensorError
from raycrew.tensor_transport.weights._publishing.selection import Select, Selection

Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_DICT_ITEMS: type = type({}.items())
_WORD = 8


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
    elif tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        kind = "quantised"
    elif tensor.device.type == "meta":
        kind = "meta"
    elif _is_wrapper(tensor):
        kind = f"wrapping ({type(tensor).__name__})"
    else:
        return
    raise UnsupportedTensorError(f"{name!r} is a {kind} tensor: it has no plain bytes to send", name=name)


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bytes, as 64-bit words, modulo 2**64: a tensor of no dimension on its device."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() <= 1:  # These may have any stride and still be contiguous.
        flat = flat.as_strided(flat.shape, (1,))
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % _WORD:
        raw = raw.clone()
    whole = raw.numel() // _WORD * _WORD
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()


@dataclass(frozen=True, slots=True)
class _Taken:
    """A tensor as it was when it was taken; `source` gives None where it is gone by then."""

    name: str
    source: Callable[[], torch.Tensor | None]
    version: int | None
    content: torch.Tensor


class SourceWatch:
    """Sees whether tensors still are what was taken of them.

    torch counts most writes to a tensor, but not those of fused optimizers, through `.data`, through numpy or
    to inference tensors. So the elements are summed up as well, once in the copy and once in the tensor when
    all were copied: if neither sum nor counter of any tensor differs, then all of them had the copied values
    at one moment, that between the last copy and the first look back.

    Args:
        held: Whether the tensors stay alive and must keep their values until `check`. If not (an iterator may
            make each tensor as it is asked for, in one buffer), each is compared as soon as it was copied,
            and at the end only those that belong to a model: parameters, and parts of a DTensor.
    """

    def __init__(self, *, held: bool = False) -> None:
        self._held = held
        self._taken: list[_Taken] = []
        self._versions: dict[str, int | None] = {}

    def gather(self, name: str, tensor: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """A tensor that is about to be copied: a DTensor is gathered (a collective), or its part alone."""
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedTensorError(f"{name!r} is a {type(tensor).__name__}, not a tensor", name=name)
        full = getattr(tensor, "full_tensor", None)
        if not callable(full):
            self._versions[name] = _version(tensor)
            return tensor.detach()
        part = _memory(tensor)
        self._taken.append(_Taken(name, self._reference(tensor), _version(part), fold(part)))
        found: torch.Tensor = full() if whole else part
        return found.detach()

    def copied(self, name: str, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """`copy` was made of `tensor`, as `gather` got it.

        Raises:
            SourceChangedError: Somebody wrote to it meanwhile.
        """
        if callable(getattr(tensor, "full_tensor", None)):
            return
        taken = _Taken(name, self._reference(tensor), self._versions.pop(name), fold(copy))
        if not self._held:
            _refuse_changed([taken])
        if self._held or isinstance(tensor, torch.nn.Parameter):
            self._taken.append(taken)

    def changing(self, name: str, tensor: torch.Tensor) -> None:
        """What is copied will be made of `tensor`, and have other elements."""
        if callable(getattr(tensor, "full_tensor", None)):
            return
        taken = _Taken(name, self._reference(tensor), self._versions.pop(name), fold(tensor))
        if self._held or isinstance(tensor, torch.nn.Parameter):
            self._taken.append(taken)

    def check(self) -> None:
        """Compare all tensors with what was taken of them.

        Raises:
            SourceChangedError: Some were written to; the error names them.
        """
        _refuse_changed(self._taken)

    def _reference(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        return (lambda: tensor) if self._held else weakref.ref(tensor)


def _refuse_changed(taken: Sequence[_Taken]) -> None:
    present = [(t, _memory(source)) for t in taken if (source := t.source()) is not None]
    found = _values([fold(memory) for _, memory in present])
    before = _values([t.content for t, _ in present])
    names = [
        t.name
        for (t, memory), old, new in zip(present, before, found, strict=True)
        if old != new or t.version != _version(memory)
    ]
    if names:
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        error = SourceChangedError(
            f"{len(names)} of the tensors were written to while they were published: {shown}; nothing was "
            "published. Publish between training steps, or publish a copy of the weights"
        )
        error.names = tuple(names)
        raise error


def _values(folds: Sequence[torch.Tensor]) -> list[int]:
    """The values of folds on any devices, with one transfer from each."""
    found = [0] * len(folds)
    for device in {value.device for value in folds}:
        where = [i for i, value in enumerate(folds) if value.device == device]
        for i, value in zip(where, torch.stack([folds[i] for i in where]).tolist(), strict=True):
            found[i] = value
    return found


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What tells which elements a tensor has; None where that can't be told."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout != torch.strided:
        return None
    layout: tuple[Any, ...] = ()
    if hasattr(tensor, "to_local"):
        layout = (tensor.device_mesh, tensor.placements, tuple(tensor.shape))  # type: ignore[attr-defined]
        tensor = _memory(tensor)
    if tensor.device.type == "meta" or _is_wrapper(tensor) or not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    shape = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (tensor.device, storage, *shape, tensor.dtype, tensor.is_conj(), tensor.is_neg(), *layout)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory is this process's part."""
    local = getattr(tensor, "to_local", None)
    part: torch.Tensor = local() if callable(local) else tensor
    return part.detach()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its class says what operations mean: its memory may be nowhere, or mean something else."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _version(tensor: torch.Tensor) -> int | None:
    """How often torch saw a write to the tensor; None where it does not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - there is no other way to ask
