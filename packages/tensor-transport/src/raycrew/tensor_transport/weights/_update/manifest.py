"""What an update is: names, shapes, dtypes, where their bytes lie, and a checksum for each bucket."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raycrew.tensor_transport._bytes import ByFields
from raycrew.tensor_transport._ray import CachedProperty
from raycrew.tensor_transport.errors import ManifestMismatchError, WeightUpdateError
from raycrew.tensor_transport.weights._update.spans import Span

Schema = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape)."""


@dataclass(frozen=True, slots=True)
class TensorEntry(ByFields):
    """One named tensor, or a piece of one: `size_bytes` bytes at `offset` of bucket `bucket`.

    Tied tensors share a place. A piece begins at `start` of a tensor of shape `whole`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    size_bytes: int
    start: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def is_piece(self) -> bool:
        """Whether other pieces belong to the same tensor."""
        return bool(self.whole)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this is, or is a piece of."""
        return self.whole or self.shape

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """This tensor's bytes in `bucket` (uint8, 1-D), without a copy."""
        raw = bucket[self.offset : self.offset + self.size_bytes] if self.size_bytes else bucket[:0]
        return raw.view(getattr(torch, self.dtype)).reshape(self.shape)


_FIELDS = operator.attrgetter(*TensorEntry.__slots__)


@dataclass(frozen=True, slots=True)
class Bucket(ByFields):
    """One run of bytes in a store.

    Attributes:
        ticket: What the store finds it by.
        size_bytes: How many they are.
        checksum: Of the bytes; None where the publisher was told to make none.
    """

    ticket: Any
    size_bytes: int
    checksum: int | None


@dataclass(frozen=True)
class BucketPlan:
    """Which tensor lies where, whatever the values: the same for all versions of an unchanged model."""

    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]

    @CachedProperty
    def columns(self) -> bytes:
        """All of it as bytes, as it is sent: equal plans have the same ones."""
        return json.dumps([self.bucket_sizes, *zip(*map(_FIELDS, self.tensors), strict=True)]).encode()

    @CachedProperty
    def digest(self) -> str:
        """Of names, dtypes, shapes, pieces and places."""
        return hashlib.blake2b(self.columns, digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan_of, (self.columns,)  # Whoever gets it makes the digest anew.

    @CachedProperty
    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape of the whole tensor)."""
        return {entry.name: (entry.dtype, entry.full_shape) for entry in self.tensors}

    @CachedProperty
    def by_bucket(self) -> tuple[tuple[TensorEntry, ...], ...]:
        """The entries of each bucket."""
        found: list[list[TensorEntry]] = [[] for _ in self.bucket_sizes]
        for entry in self.tensors:
            found[entry.bucket].append(entry)
        return tuple(map(tuple, found))


def _plan_of(columns: bytes) -> BucketPlan:
    bucket_sizes, *fields = json.loads(columns)
    entries = [
        TensorEntry(name, dtype, tuple(shape), bucket, offset, size_bytes, tuple(start), tuple(whole))
        for name, dtype, shape, bucket, offset, size_bytes, start, whole in zip(*fields, strict=True)
    ]
    plan = BucketPlan(tuple(entries), tuple(bucket_sizes))
    vars(plan)["columns"] = columns
    return plan


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A complete, published version of a model's weights: small, picklable, for any number of receivers.

    Attributes:
        publisher: Unique name of the publisher's incarnation.
        version: Counts up within a publisher.
        tensors: Every named tensor, or piece of one, and its place.
        buckets: Where the bytes are.
        gather_s: Seconds spent collecting the tensors (all-gathers and device copies included).
        put_s: Seconds spent on checksums and on copying the buckets into the store.
        part: Which part of the version this is; `join_updates` makes one of all parts.
        parts: How many parts there are, one per publishing rank.
        bases: Versions to one of which this has to be added; None where it is all of a model.
        digest: Of all of it but the buckets' tickets and checksums, as the publisher made it: receivers
            compare.
        spans: When the publisher did what.
    """

    publisher: str
    version: int
    tensors: tuple[TensorEntry, ...] = field(repr=False)
    buckets: tuple[Bucket, ...] = field(repr=False)
    gather_s: float = 0.0
    put_s: float = 0.0
    part: int = 0
    parts: int = 1
    bases: frozenset[int] | None = None
    digest: str = ""
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes that one receiver moves."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def plan(self) -> BucketPlan:
        """Which tensor lies where."""
        return BucketPlan(self.tensors, tuple(bucket.size_bytes for bucket in self.buckets))

    @property
    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape)."""
        return self.plan.schema


def manifest_digest(
    plan_digest: str, publisher: str, version: int, part: int, parts: int, bases: frozenset[int] | None
) -> str:
    """What both sides compare before a byte moves: the plan, whose it is, and which version of it."""
    head = (plan_digest, publisher, version, part, parts, None if bases is None else sorted(bases))
    return hashlib.blake2b(repr(head).encode(), digest_size=16).hexdigest()


def sealed(update: WeightUpdate, plan: BucketPlan | None = None) -> WeightUpdate:
    """The update with its digest."""
    return dataclasses.replace(update, digest=_digest_of(update, plan or update.plan))


def check_digest(update: WeightUpdate) -> None:
    """Compare an update with the digest that its publisher made of it.

    Raises:
        ManifestMismatchError: It is not what was published.
    """
    if _digest_of(update, update.plan) != update.digest:
        raise ManifestMismatchError(
            f"update {update.version} is not what its publisher made: the digest of its manifest differs; "
            "nothing was fetched. Publisher and receiver may run different releases of raycrew"
        )


def join_updates(updates: Sequence[WeightUpdate]) -> WeightUpdate:
    """One update of all parts of a version.

    Raises:
        WeightUpdateError: They are of several versions, a part is missing or comes twice.
    """
    if len(updates) == 1 and updates[0].parts == 1:
        return updates[0]
    parts = sorted(updates, key=lambda update: update.part)
    if len({update.version for update in parts}) != 1:
        raise WeightUpdateError(
            f"the parts are of several versions: {[(update.part, update.version) for update in parts]}"
        )
    if {update.parts for update in parts} != {len(parts)} or [u.part for u in parts] != list(
        range(len(parts))
    ):
        raise WeightUpdateError(
            f"parts {[update.part for update in parts]} are not all of {parts[0].parts}: every rank of the "
            "trainer has to publish its own part"
        )
    return _joined(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def schema_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The schema of a state dict; meta tensors will do."""
    return {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def compare_schemas(expected: Schema, offered: Schema, version: int, *, partial: bool = False) -> None:
    """Check what an update offers against what the receiver has; with `partial`, names may be missing.

    Raises:
        ManifestMismatchError: With every missing name, unexpected name, and differing shape or dtype.
    """
    missing = [] if partial else sorted(expected.keys() - offered.keys())
    unexpected = sorted(offered.keys() - expected.keys())
    mismatched = [
        f"{name}: receiver has {_describe(expected[name])}, update has {_describe(offered[name])}"
        for name in sorted(expected.keys() & offered.keys())
        if (expected[name][0], tuple(expected[name][1])) != offered[name]
    ]
    if not (missing or unexpected or mismatched):
        return
    parts = [
        f"{title}: {_shorten(found)}"
        for title, found in (("missing", missing), ("unexpected", unexpected), ("different", mismatched))
        if found
    ]
    error = ManifestMismatchError(
        f"update {version} does not fit the receiver's weights; nothing was fetched; " + "; ".join(parts),
        version=version,
    )
    error.missing, error.unexpected, error.mismatched = missing, unexpected, mismatched
    raise error


def _digest_of(update: WeightUpdate, plan: BucketPlan) -> str:
    return manifest_digest(
        plan.digest, update.publisher, update.version, update.part, update.parts, update.bases
    )


def _joined(parts: Sequence[WeightUpdate]) -> WeightUpdate:
    tensors: list[TensorEntry] = []
    buckets: list[Bucket] = []
    for update in parts:
        check_digest(update)
        shift = len(buckets)
        tensors += [dataclasses.replace(entry, bucket=entry.bucket + shift) for entry in update.tensors]
        buckets += update.buckets
    bases = [update.bases for update in parts if update.bases is not None]
    return sealed(
        WeightUpdate(
            publisher=joined_name([update.publisher for update in parts]),
            version=parts[0].version,
            tensors=tuple(tensors),
            buckets=tuple(buckets),
            gather_s=max(update.gather_s for update in parts),
            put_s=max(update.put_s for update in parts),
            bases=frozenset.intersection(*bases) if bases else None,
            spans=tuple(span for update in parts for span in update.spans),
        )
    )


def joined_name(publishers: Sequence[str]) -> str:
    """One name for publishers that publish together, each its part."""
    if len(publishers) == 1:
        return publishers[0]
    return hashlib.blake2b("+".join(publishers).encode(), digest_size=16).hexdigest()


def _describe(entry: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = entry
    return f"{dtype}{list(shape)}"


def _shorten(found: Sequence[str], limit: int = 5) -> str:
    rest = f", and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + rest
