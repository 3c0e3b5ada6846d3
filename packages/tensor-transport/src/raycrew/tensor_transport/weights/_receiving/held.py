"""What a receiver holds: one value, so that other threads never see half of a change."""

import operator
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, runtime_checkable

from raycrew.tensor_transport.errors import BaseVersionError, StaleVersionError, StaleWeightsError


@runtime_checkable
class Published(Protocol):
    """A version and whose it is, as a `WeightUpdate` and the report of `sync_weights` say it."""

    @property
    def version(self) -> int:
        """Its number."""
        ...

    @property
    def publisher(self) -> str:
        """Who numbered it."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """What a receiver holds.

    Attributes:
        version: The last version that was applied whole.
        publisher: Whose it is.
        intact: Whether the weights are those of `version`.
        loading: The version that is being loaded, or is not decided yet, or that was left half-way.
        is_numbered_once: Whether the receiver's directory numbered the version: it uses no number again.
        superseded: Publishers whose versions were replaced by those of another one: they are all older.
    """

    version: int | None = None
    publisher: str | None = None
    intact: bool = True
    loading: int | None = None
    is_numbered_once: bool = False
    superseded: frozenset[str] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether the weights are those of a version."""
        return self.version is not None and self.intact

    @property
    def number(self) -> int | None:
        """The directory's number of whole weights; None where they are of no version that it numbered."""
        return self.version if self.is_whole and self.is_numbered_once else None

    def is_one_of(self, numbers: Container[int], publisher: str, *, is_numbered_once: bool) -> bool:
        """Whether whole weights are those that a publisher, or the directory, gave one of these numbers."""
        is_its = self.publisher == publisher or (self.is_numbered_once and is_numbered_once)
        return self.is_whole and is_its and self.version in numbers

    def followed_by(self, version: int, publisher: str, *, is_numbered_once: bool) -> "Held":
        """What is held once a version was applied whole."""
        superseded = self.superseded
        if self._is_before(version, is_numbered_once=is_numbered_once):
            superseded -= {publisher}
        elif self.publisher is not None and self.publisher != publisher:
            superseded |= {self.publisher}
        return Held(version, publisher, is_numbered_once=is_numbered_once, superseded=superseded)

    def _is_before(self, version: int, *, is_numbered_once: bool) -> bool:
        """Whether the directory numbered a version, and before the one that was applied last."""
        is_known = self.is_numbered_once and is_numbered_once
        return is_known and self.version is not None and version < self.version

    def check_next(
        self, version: int, publisher: str, bases: Collection[int] | None, *, is_numbered_once: bool
    ) -> None:
        """Refuse a version that does not follow what is held: an older one, or changes of something else.

        A mixture may begin again with an earlier version of its directory, on the way to what came after it.

        Raises:
            StaleVersionError: A later version is held, or its publisher was replaced.
            BaseVersionError: It has to be added to another version.
        """
        is_same = publisher == self.publisher
        if is_same and self.version is not None and version < self.version and self.intact:
            raise StaleVersionError(f"update {version} is stale: version {self.version} is held already")
        begins_again = not self.intact and self._is_before(version, is_numbered_once=is_numbered_once)
        if publisher in self.superseded and not begins_again:
            raise StaleVersionError(
                f"update {version} is stale: its publisher {publisher:.8} was replaced by "
                f"{self.publisher:.8}, whose version {self.version} was applied; only a publisher that is "
                "not replaced may go on"
            )
        if bases is not None and not self.is_one_of(bases, publisher, is_numbered_once=is_numbered_once):
            error = BaseVersionError(
                f"update {version} has to be added to one of the versions {sorted(bases)} of its "
                "publisher: apply one of them first, or pull()"
            )
            error.bases = tuple(sorted(bases))
            raise error

    def check(self, required: SupportsIndex | Published | None) -> int:
        """The version, for who makes something with these weights.

        Raises:
            StaleWeightsError: They are of no version, not known to be of the required or a later one, or a
                mixture.
            TypeError: What is required is no number, and nothing that was published.
        """
        if not isinstance(required, int | Published | None):
            required = operator.index(required)
        if self.version is None and self.intact:
            why = "this receiver was made, or made again, and holds no version yet: pull(), or update it"
        elif self.version is None or not self.intact:
            why = self.standing()
        elif lack := self._lack(self.version, required):
            why = f"the receiver holds version {self.version}{lack}"
        else:
            return self.version
        number = required if required is None or isinstance(required, int) else required.version
        raise StaleWeightsError(why, version=number or 0, current_version=self.version, intact=self.intact)

    def _lack(self, version: int, required: int | Published | None) -> str:
        """What speaks against this version being the required or a later one; "" if nothing does."""
        if required is None:
            return ""
        if isinstance(required, int):
            return self._lack_of_number(version, required)
        if required.publisher in self.superseded:
            return ""
        if required.publisher != self.publisher:
            return (
                f" of publisher {self.publisher:.8}, and version {required.version} of publisher "
                f"{required.publisher:.8} is required: update it, or pull()"
            )
        return self._lack_of_number(version, required.version, is_same_publisher=True)

    def _lack_of_number(self, version: int, number: int, *, is_same_publisher: bool = False) -> str:
        if version < number:
            return f", and version {number} is required: pull()"
        if version > number and not (is_same_publisher or self.is_numbered_once):
            return (
                f", and version {number} is required, which may be a later one: without a directory each "
                "publisher counts from 1. Require what was published (its WeightUpdate, or the report of "
                "sync_weights) in place of its number"
            )
        return ""

    def standing(self) -> str:
        """The same in words."""
        held = "no version" if self.version is None else f"version {self.version}"
        if self.intact:
            return f"the receiver still holds and reports {held}"
        return (
            f"the receiver still reports {held}, but its weights are a mixture: version {self.loading} is "
            "being loaded, is not decided, or failed; apply an update again where it failed"
        )
