"""Which versions a partial update can be added to."""

from collections.abc import Mapping

Names = Mapping[int, frozenset[str] | None]
"""What each part of a version changed; None where it was all of the part."""


class Lineage:
    """The changes since the last version that was all of a model.

    A version among whose changes are those of the one before takes its place here, and has its number: what
    covers the later changes covers the earlier ones. So training that changes the same tensors each time is
    remembered as one change; others are as many as the versions that one has to begin with.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[list[int], Names]] = []

    def bases(self, names: Names) -> frozenset[int] | None:
        """The versions that a version can be added to, as all changes since are among its names.

        None where it is all of a model itself.
        """
        if all(found is None for found in names.values()):
            return None
        bases: set[int] = set()
        for numbers, changed in reversed(self._changes):
            bases.add(numbers[-1])
            if not _covers(names, changed):
                break
            bases.update(numbers)
        return frozenset(bases)

    def note(self, number: int, names: Names) -> None:
        """A version is the last one now."""
        if all(found is None for found in names.values()):
            self._changes = []
        numbers = [number]
        while self._changes and _covers(names, self._changes[-1][1]):
            numbers = self._changes.pop()[0] + numbers
        self._changes.append((numbers, dict(names)))


def _covers(names: Names, changed: Names) -> bool:
    """Whether changes are among others; parts of another number are parts of something else."""
    return names.keys() == changed.keys() and all(
        (mine := names[part]) is None or (found is not None and found <= mine)
        for part, found in changed.items()
    )
