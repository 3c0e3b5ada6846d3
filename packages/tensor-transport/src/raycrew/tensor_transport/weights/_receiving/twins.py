"""What an update has for names that are one tensor here: the same elements of all, or it does not fit."""

from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from raycrew.tensor_transport._bytes import flat_bytes
from raycrew.tensor_transport.errors import ManifestMismatchError
from raycrew.tensor_transport.weights._receiving.fetching import Assembler, Fetched, Heading, without
from raycrew.tensor_transport.weights._update import TensorEntry, checksum


class Twins:
    """Compares them, of one version: else the last one that is written would count for all.

    Args:
        heading: Of the version.
        twins: Each name whose elements have other names in this process, and the first of these.
    """

    def __init__(self, heading: Heading, twins: Mapping[str, str]) -> None:
        self._version = heading.version
        self._twins = _apart(heading.entries, twins)
        self._looks_first = bool(self._twins) and heading.entries is not None
        self._late = twins if heading.bases is not None and heading.entries is None else {}
        self._seen: dict[str, tuple[str, int]] = {}

    def compared(self, buckets: Iterable[Fetched]) -> Iterable[Fetched]:
        """The same buckets: all of them once they were looked at, where they are known to differ in place.

        So are those of a partial version whose names come with them.

        Raises:
            ManifestMismatchError: Names that are one tensor here differ, or only some of them come.
        """
        if self._late:
            buckets = list(buckets)
            come = {entry.name for fetched in buckets for entry in fetched.parcel.entries}
            check_together(come, self._late, self._version)
        if not self._looks_first:
            return buckets
        found, assembler, names = list(buckets), Assembler(self._version), frozenset(self._twins)
        for fetched in found:
            some = Fetched(without(fetched.parcel, names), fetched.data)
            for name, tensor in assembler.whole(some.tensors()):
                self.compare(name, tensor)
        self._twins = {}
        return found

    def compare(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ManifestMismatchError if a tensor differs from that of a name which is the same one here."""
        first = self._twins.get(name)
        if first is None:
            return
        value = checksum(flat_bytes(tensor))
        other, expected = self._seen.setdefault(first, (name, value))
        if value != expected:
            error = ManifestMismatchError(
                f"update {self._version} does not fit the receiver's weights: {other!r} and {name!r} are one "
                "tensor here, and differ in the update; publish them tied, or untie them here",
                version=self._version,
            )
            error.mismatched = [other, name]
            raise error


def check_together(names: Container[str], twins: Mapping[str, str], version: int) -> None:
    """Raise ManifestMismatchError if some names that are one tensor here are among these, and not all.

    What a partial version brings for one of them would be that of the others, too, which its source may not
    have changed.
    """
    brought = {first for name, first in twins.items() if name in names}
    missing = sorted(name for name, first in twins.items() if first in brought and name not in names)
    if missing:
        error = ManifestMismatchError(
            f"update {version} does not fit the receiver's weights: it lacks "
            f"{', '.join(map(repr, missing[:5]))}, which is one tensor here with a name that it brings; "
            "publish all of them, or untie them here",
            version=version,
        )
        error.missing = missing
        raise error


def _apart(entries: Sequence[Sequence[TensorEntry]] | None, twins: Mapping[str, str]) -> dict[str, str]:
    """Those that do not lie at one place of the update, as far as is known."""
    places: dict[str, set[tuple[int, int, int, tuple[int, ...]]]] = {}
    for part, entry in ((part, entry) for part, found in enumerate(entries or ()) for entry in found):
        if entry.name in twins:
            places.setdefault(entry.name, set()).add((part, entry.bucket, entry.offset, entry.start))
    differ = {first for name, first in twins.items() if places.get(name) != places.get(first)}
    return {name: first for name, first in twins.items() if entries is None or first in differ}
