"""What a receiver keeps to return to the version that it had, and how it does."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.weights._receiving.fetching import Assembler, Fetched, Parcel, without

RollbackKind = Literal["shadow", "refetch", "none"]
Refetch = Callable[[int], Iterator[Fetched]]
"""The buckets of a version, fetched again."""


class Rollback(Protocol):
    """Remembers the last committed version."""

    @property
    def keeps_buckets(self) -> bool:
        """Whether `committed` needs the buckets' bytes."""
        ...

    def is_at_hand(self, names: frozenset[str]) -> bool:
        """Whether the tensors of these names, as they are, can be had back without asking anybody."""
        ...

    def committed(self, version: int, fetched: Sequence[Fetched]) -> None:
        """A version was applied."""
        ...

    def weights(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]] | None:
        """The tensors of these names as they were; None where they cannot be had.

        Raises:
            WeightUpdateError: While they are read: they are gone, or damaged.
        """
        ...


class NoRollback:
    """Keeps nothing."""

    keeps_buckets = False

    def is_at_hand(self, names: frozenset[str]) -> bool:  # noqa: ARG002
        return False

    def committed(self, version: int, fetched: Sequence[Fetched]) -> None:
        pass

    def weights(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]] | None:  # noqa: ARG002
        return None


class ShadowRollback:
    """Keeps the buckets of what was applied: the memory of one model, of two during an update."""

    keeps_buckets = True

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[int, Fetched]]] = {}

    def is_at_hand(self, names: frozenset[str]) -> bool:
        return names <= self._held.keys()

    def committed(self, version: int, fetched: Sequence[Fetched]) -> None:
        fresh: dict[str, list[tuple[int, Fetched]]] = {}
        for one in fetched:
            for entry in one.parcel.entries:
                places = fresh.setdefault(entry.name, [])
                if not places or places[-1][1] is not one:
                    places.append((version, one))
        self._held.update(fresh)

    def weights(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]] | None:
        if not self.is_at_hand(names):
            return None
        return self._read(names)

    def _read(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted: dict[int, tuple[int, Fetched, set[str]]] = {}
        for name in names:
            for version, fetched in self._held[name]:
                wanted.setdefault(id(fetched), (version, fetched, set()))[2].add(name)
        assembler = Assembler(0)
        for version, fetched, found in wanted.values():
            fetched.verify(version)
            parcel = without(fetched.parcel, frozenset(found))
            yield from assembler.whole(Fetched(parcel, fetched.data).tensors())
        assembler.check_empty()


class RefetchRollback:
    """Keeps the numbers of versions, and fetches them again: no memory, and only while they are kept."""

    keeps_buckets = False

    def __init__(self, refetch: Refetch) -> None:
        self._versions: dict[str, int] = {}
        self._refetch = refetch

    def is_at_hand(self, names: frozenset[str]) -> bool:  # noqa: ARG002
        return False

    def committed(self, version: int, fetched: Sequence[Fetched]) -> None:
        for one in fetched:
            for entry in one.parcel.entries:
                self._versions[entry.name] = version

    def weights(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]] | None:
        if not names <= self._versions.keys():
            return None
        return self._read(names)

    def _read(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        assembler, missing = Assembler(0), set(names)
        for version in sorted({self._versions[name] for name in names}):
            wanted = frozenset(name for name in names if self._versions[name] == version)
            for fetched in self._refetch(version):
                parcel = without(fetched.parcel, wanted)
                for name, tensor in assembler.whole(Fetched(parcel, fetched.data).tensors()):
                    missing.discard(name)
                    yield name, tensor
        assembler.check_empty()
        if missing:
            raise WeightUpdateError(f"{sorted(missing)[:5]} are not in the versions that they came with")


def bare(fetched: Fetched) -> Fetched:
    """What is known of a bucket, without its bytes."""
    parcel: Parcel = fetched.parcel
    return Fetched(parcel, fetched.data.new_empty(0))  # A slice of no bytes would hold all of them.
