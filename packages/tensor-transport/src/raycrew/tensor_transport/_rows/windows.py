"""Which columns of a tensor a handle names, where padding was trimmed or columns were cut."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

from raycrew.tensor_transport._rows.shards import TensorShardInfo, check_alike


class Window(NamedTuple):
    """The columns from `start` up to `end`, in the numbering of the tensor with its padding.

    Attributes:
        start: The first one.
        end: One past the last one.
        width: Columns with the padding that was trimmed on storing; None where the first ones were cut: there
            is no padding to restore then.
    """

    start: int
    end: int
    width: int | None

    @classmethod
    def of(cls, shards: Sequence[TensorShardInfo]) -> Self:
        """The columns of all shards.

        Raises:
            ValueError: There is none, or they differ, or their padding does: see `joined`.
        """
        if not shards:
            raise ValueError("a handle has at least one shard")
        check_alike(shards)
        windows = [cls(*shard.columns, shard.full_width) for shard in shards]
        if not _are_alike(windows):
            widths = {width for *_, width in windows}
            raise ValueError(f"shards of {_listed(widths)} columns do not make one tensor")
        return cls.joined(windows)

    @classmethod
    def joined(cls, windows: Sequence[Self]) -> Self:
        """The columns of all: one window, or several of tensors that are equally wide with their padding.

        Where padding was trimmed on the right of each, the others get more of it.

        Raises:
            ValueError: They are not, or columns were cut.
        """
        columns = {(start, end) for start, end, _ in windows}
        widths = {width for _, _, width in windows}
        if not _are_alike(windows):
            raise ValueError(
                f"handles of columns {sorted(columns)} of {_listed(widths)} do not join; nothing is padded "
                "silently: localize() them first, or truncate all alike"
            )
        width = None if None in widths else max(width for width in widths if width is not None)
        return cls(min(start for start, _ in columns), max(end for _, end in columns), width)

    @property
    def shown(self) -> int:
        """How many columns."""
        return self.end - self.start

    def cut(self, start: int, end: int) -> Self:
        """Some of these columns, numbered from the first of them; what was cut off is no padding.

        Raises:
            IndexError: They are not all there.
        """
        if not 0 <= start <= end <= self.shown:
            raise IndexError(f"columns {start}..{end} are not within {self.shown}")
        if (start, end) == (0, self.shown):
            return self
        first, last = self.start + start, self.start + end
        return type(self)(first, last, None if first else last)

    def truncated(self, length: int) -> Self:
        """At most `length` of these columns, also with their padding.

        Raises:
            IndexError: The length is negative.
        """
        kept = self.cut(0, min(length, self.shown))
        if self.width is None or length >= self.width:
            return kept
        return kept._replace(width=None if self.start and length < self.end else length)

    def padded(self) -> Self:
        """With the padding that was trimmed; the same where none is known."""
        return self if self.width is None else self._replace(start=0, end=self.width)


def _are_alike(windows: Sequence[Window]) -> bool:
    """Whether rows of these columns make one tensor, with padding that is known to be on the right if any."""
    columns = {(start, end) for start, end, _ in windows}
    widths = {width for *_, width in windows}
    if None in widths:
        return len(columns) == 1 and len(widths) <= 2
    return len(widths) == 1 or all(not start and end < width for start, end, width in windows if width)


def _listed(widths: Collection[int | None]) -> str:
    known = sorted(width for width in widths if width is not None)
    return " and ".join([*map(str, known), *["cut ones"] * (None in widths)])
