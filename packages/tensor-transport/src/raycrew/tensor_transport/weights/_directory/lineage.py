"""Which versions a partial update can be added to."""

from collections.abc import Mapping

Names = Mapping[int, frozenset[str] | None]
"""What each part of a version changed; None where it was all of the part."""


class Lineage:
    """The changes since the last version that was all of a model."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, Names]] = []

    def bases(self, names: Names) -> frozenset[int] | None:
        """The versions that a version can be added to, as all changes since are among its names.

        None where it is all of a model itself.
        """
        if all(found is None for found in names.values()):
            return None
        bases: set[int] = set()
        for number, changed in reversed(self._changes):
            bases.add(number)
            if names.keys() != changed.keys():  # Parts of another number are parts of something else.
                break
            if not all(_covers(names[part], found) for part, found in changed.items()):
                break
        return frozenset(bases)

    def note(self, number: int, names: Names) -> None:
        """A version is the last one now."""
        if all(found is None for found in names.values()):
            self._changes = []
        self._changes.append((number, dict(names)))


def _covers(names: frozenset[str] | None, changed: frozenset[str] | None) -> bool:
    return names is None or (changed is not None and changed <= names)
