"""Which tensor goes into which bucket, decided from names, dtypes and shapes alone."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from raycrew.tensor_transport.weights._update import BucketPlan, TensorEntry

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What of a tensor decides its place; `start` and `whole` as in `TensorEntry`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class Placer:
    """Gives tensors their places, one after another; a tensor larger than a bucket has one of its own."""

    def __init__(self, bucket_bytes: int) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.sizes: list[int] = []
        self._bucket_bytes = bucket_bytes
        self._used = self._pending = self._end = 0

    def place(self, spec: TensorSpec, twin: str | None = None) -> TensorEntry:
        """A place for a tensor, that of the tensor named `twin` if there is one.

        Raises:
            ValueError: The name comes twice.
        """
        if spec.name in self.entries or (twin is not None and twin not in self.entries):
            raise ValueError(f"the name {spec.name!r} comes twice")
        if twin is not None:
            entry = dataclasses.replace(self.entries[twin], name=spec.name)
        else:
            size = spec.size_bytes
            if self._used and self._used + size > self._bucket_bytes:
                self.close_bucket()
            place = (len(self.sizes), self._used, size)
            entry = TensorEntry(spec.name, spec.dtype, spec.shape, *place, spec.start, spec.whole)
            self._pending += 1
            self._end = self._used + size
            self._used += -(-size // ALIGNMENT) * ALIGNMENT
        self.entries[spec.name] = entry
        return entry

    def close_bucket(self) -> None:
        """No more tensors go into the current bucket."""
        if self._pending:
            self.sizes.append(self._end)
        self._used = self._pending = self._end = 0

    def plan(self) -> BucketPlan:
        """All places so far, once the last bucket is closed."""
        return BucketPlan(tuple(self.entries.values()), tuple(self.sizes))


def plan_buckets(specs: Iterable[TensorSpec], ties: Mapping[str, str], bucket_bytes: int) -> BucketPlan:
    """The places of all tensors."""
    placer = Placer(bucket_bytes)
    for spec in specs:
        placer.place(spec, ties.get(spec.name))
    placer.close_bucket()
    return placer.plan()


class PlanCache:
    """The last plan, which an unchanged model has again: its places and digest are worked out once."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Sequence[TensorSpec], Mapping[str, str], int], BucketPlan] | None = None

    def plan(self, specs: Sequence[TensorSpec], ties: Mapping[str, str], bucket_bytes: int) -> BucketPlan:
        """The places of all tensors."""
        asked = (specs, ties, bucket_bytes)
        if self._last is None or self._last[0] != asked:
            self._last = (asked, plan_buckets(*asked))
        return self._last[1]
