"""What an update has for names with one memory here: the same elements of all, or it does not fit."""

from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from raycrew.tensor_transport._bytes import flat_bytes
from raycrew.tensor_transport.errors import ManifestMismatchError
from raycrew.tensor_transport.weights._receiving.fetching import Assembler, Fetched, Heading, without
from raycrew.tensor_transport.weights._update import (
    Image,
    Overlap,
    TensorEntry,
    checksum,
    overlaps_of,
    twins_of,
)


class Ties(NamedTuple):
    """Which names have memory in common in this process.

    Attributes:
        twins: Each name whose elements have other names, and the first of these.
        overlaps: Names that have some bytes in common.
    """

    twins: Mapping[str, str] = MappingProxyType({})
    overlaps: Sequence[Overlap] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Ties":
        """Those of a model."""
        return cls(twins_of(tensors), overlaps_of(tensors))

    def check_together(self, names: Container[str], version: int) -> None:
        """Raise ManifestMismatchError if some names of common memory are among these, and not all.

        What a partial version brings for one of them would be that of the others, too, which its source may
        not have changed.
        """
        brought = {first for name, first in self.twins.items() if name in names}
        missing = {name for name, first in self.twins.items() if first in brought and name not in names}
        what = "is one tensor"
        if not missing:
            what = "has memory in common"
            groups = [overlap for overlap in self.overlaps if any(name in names for name in overlap)]
            missing = {name for group in groups for name in group if name not in names}
        if missing:
            error = ManifestMismatchError(
                f"update {version} does not fit the receiver's weights: it lacks "
                f"{', '.join(map(repr, sorted(missing)[:5]))}, which {what} here with a name that it brings; "
                "publish all of them, or untie them here",
                version=version,
            )
            error.missing = sorted(missing)
            raise error


class Twins:
    """Compares them, of one version: else the last one that is written would count for all.

    Args:
        heading: Of the version.
        ties: Which names have memory in common in this process.
    """

    def __init__(self, heading: Heading, ties: Ties) -> None:
        self._version = heading.version
        self._twins = _apart(heading.entries, ties.twins)
        self._images = {name: image for o in ties.overlaps for image in [Image(o)] for name in o}
        self._looks_first = bool(self._twins or self._images) and heading.entries is not None
        self._late = ties if heading.bases is not None and heading.entries is None else Ties()
        self._seen: dict[str, tuple[str, int]] = {}

    def compared(self, buckets: Iterable[Fetched]) -> Iterable[Fetched]:
        """The same buckets: all of them once they were looked at, where they are known to differ in place.

        So are those of a partial version whose names come with them.

        Raises:
            ManifestMismatchError: Names that have memory in common here differ, or only some of them come.
        """
        if any(self._late):
            buckets = list(buckets)
            come = {entry.name for fetched in buckets for entry in fetched.parcel.entries}
            self._late.check_together(come, self._version)
        if not self._looks_first:
            return buckets
        found, assembler = list(buckets), Assembler(self._version)
        names = frozenset(self._twins) | frozenset(self._images)
        for fetched in found:
            some = Fetched(without(fetched.parcel, names), fetched.data)
            for name, tensor in assembler.whole(some.tensors()):
                self.compare(name, tensor)
        self._twins, self._images = {}, {}
        return found

    def compare(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ManifestMismatchError if a tensor differs from that of a name with the same memory here."""
        if (first := self._twins.get(name)) is not None:
            value = checksum(flat_bytes(tensor))
            other, expected = self._seen.setdefault(first, (name, value))
            if value != expected:
                raise self._mismatch(other, name, "are one tensor")
        if name in self._images and (its := self._images[name].write(name, tensor)) is not None:
            raise self._mismatch(its, name, "have memory in common")

    def _mismatch(self, other: str, name: str, what: str) -> ManifestMismatchError:
        error = ManifestMismatchError(
            f"update {self._version} does not fit the receiver's weights: {other!r} and {name!r} {what} "
            "here, and differ in the update; publish them tied, or untie them here",
            version=self._version,
        )
        error.mismatched = [other, name]
        return error


def _apart(entries: Sequence[Sequence[TensorEntry]] | None, twins: Mapping[str, str]) -> dict[str, str]:
    """Those that do not lie at one place of the update, as far as is known."""
    places: dict[str, set[tuple[int, int, int, tuple[int, ...]]]] = {}
    for part, entry in ((part, entry) for part, found in enumerate(entries or ()) for entry in found):
        if entry.name in twins:
            places.setdefault(entry.name, set()).add((part, entry.bucket, entry.offset, entry.start))
    differ = {first for name, first in twins.items() if places.get(name) != places.get(first)}
    return {name: first for name, first in twins.items() if entries is None or first in differ}
