"""The tensors to publish, one after another, as they are wanted, and watched until all were taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from raycrew.tensor_transport.weights._publishing.placing import TensorSpec
from raycrew.tensor_transport.weights._publishing.selection import Selection
from raycrew.tensor_transport.weights._publishing.source import (
    SourceWatch,
    Weights,
    find_ties,
    listed,
    refuse_without_bytes,
    source_changed,
)
from raycrew.tensor_transport.weights._update import Region, dtype_name, region_of


@dataclass(frozen=True)
class Taken:
    """A tensor to be copied; `copied` is called with the copy's fold, unless it shares the place of `twin`.

    One that `stays`, on the CPU, may be copied with later ones, by any thread.
    """

    spec: TensorSpec
    tensor: torch.Tensor
    twin: str | None
    copied: Callable[[torch.Tensor | int], None] | None
    stays: bool = False


class Taking:
    """One pass over a model's weights.

    Args:
        weights: The tensors.
        selection: Which, and how.
        sharded: Take this rank's shards of DTensors in place of the gathered tensors. Where there are
            DTensors, all ranks hold the other tensors alike: only the first part takes them.
        first_part: Whether this is the first part.
    """

    def __init__(self, weights: Weights, selection: Selection, *, sharded: bool, first_part: bool) -> None:
        pairs, self._held = listed(weights)
        self._selection = selection
        self._sharded = sharded
        if self._held:
            pairs = [(name, tensor) for name, tensor in pairs if selection.wants(name)]
            if sharded and not first_part and any(_is_sharded(tensor) for _, tensor in pairs):
                pairs = [(name, tensor) for name, tensor in pairs if _is_sharded(tensor)]
        self._pairs = pairs
        self._watch = SourceWatch(held=self._held)
        names_stay = self._held and selection.keeps_shapes
        self._ties = find_ties(pairs) if names_stay else {}
        self.ties = {selection.name_of(n): selection.name_of(t) for n, t in self._ties.items()}
        self._planned: Iterator[TensorSpec] | None = None

    def specs(self) -> list[TensorSpec] | None:
        """All that is going to be taken, before any of it is; None where that is not known."""
        if not (self._held and self._selection.keeps_shapes):
            return None
        found = []
        for name, tensor in self._pairs:
            if not _is_tensor(tensor):
                return None  # Refused by name when it is its turn.
            region = self._region(name, tensor)
            if region is not None:
                found.append(self._spec(name, tensor.dtype, region, tuple(tensor.shape)))
        self._planned = iter(found)
        return found

    def __iter__(self) -> Iterator[Taken]:
        """The tensors to publish.

        Raises:
            UnsupportedTensorError: One has no plain bytes.
            SourceChangedError: Somebody wrote to one meanwhile.
        """
        for name, tensor in self._pairs:
            if self._held or self._selection.wants(name):
                yield from self._take(name, tensor)
            else:
                self._watch.passed(tensor)

    def check(self, *, leaves_half: bool = False) -> None:
        """Compare all tensors with what was taken of them; half of the processors may be left to others.

        Raises:
            SourceChangedError: Some were written to, or are tied no more.
        """
        self._watch.check(leaves_half=leaves_half)
        tied = {*self._ties, *self._ties.values()}
        now = find_ties((name, tensor) for name, tensor in self._pairs if name in tied) if tied else {}
        if untied := [name for name, twin in self._ties.items() if now.get(name) != twin]:
            raise source_changed(untied)

    def _take(self, name: str, tensor: torch.Tensor) -> Iterator[Taken]:
        region = self._region(name, tensor) if _is_tensor(tensor) else None
        if region is None and _is_tensor(tensor):
            return
        full = self._watch.gather(name, tensor, whole=not self._sharded)
        refuse_without_bytes(name, full)
        whole = tuple(tensor.shape)
        if region is None or not self._takes_part_of(tensor):
            region, whole = _all_of(full), tuple(full.shape)
        if not self._selection.keeps_shapes:
            self._watch.changing(name, tensor)
            for inner, made in self._selection.apply(name, full):
                refuse_without_bytes(inner, made)
                spec = TensorSpec(inner, dtype_name(made.dtype), tuple(made.shape))
                yield Taken(spec, made.detach(), None, None)
            return
        spec = self._as_planned(name, full, self._spec(name, full.dtype, region, whole))
        twin, copied, stays = self.ties.get(spec.name), None, False
        if spec.dtype != dtype_name(full.dtype):
            self._watch.changing(name, tensor)
            ((_, full),) = self._selection.apply(name, full)
        elif not callable(getattr(tensor, "full_tensor", None)):
            stays = self._held and full.is_cpu

            def copied(content: torch.Tensor | int) -> None:
                self._watch.copied(name, tensor, content)

        yield Taken(spec, full, twin, copied, stays=stays)

    def _as_planned(self, name: str, found: torch.Tensor, spec: TensorSpec) -> TensorSpec:
        """The spec of what was found of a tensor, unless it was told otherwise before any was taken."""
        if found.shape != spec.shape or (self._planned is not None and next(self._planned, None) != spec):
            raise source_changed([name])
        return spec

    def _region(self, name: str, tensor: torch.Tensor) -> Region | None:
        if self._takes_part_of(tensor):
            return region_of(name, tensor)
        if not callable(getattr(tensor, "full_tensor", None)):
            refuse_without_bytes(name, tensor)
        return _all_of(tensor)

    def _takes_part_of(self, tensor: torch.Tensor) -> bool:
        return self._sharded and _is_sharded(tensor)

    def _spec(self, name: str, dtype: torch.dtype, region: Region, whole: tuple[int, ...]) -> TensorSpec:
        start, shape = region
        name, kind = self._selection.name_of(name), dtype_name(self._selection.dtype_of(dtype))
        if shape == whole:
            return TensorSpec(name, kind, shape)
        return TensorSpec(name, kind, shape, start, whole)


def _is_tensor(value: object) -> bool:
    """Whether a value is a tensor, whatever was promised."""
    return isinstance(value, torch.Tensor)


def _is_sharded(tensor: object) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _all_of(tensor: torch.Tensor) -> Region:
    return (0,) * tensor.ndim, tuple(tensor.shape)
