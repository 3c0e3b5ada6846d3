"""The options of a queue: one value, checked where it is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Self, TypedDict, get_args

from raycrew.worker_groups._start import size_bytes
from raycrew.worker_groups.rollouts.samples._states import WHOLE, Keys, Ledger, Stale, order_of, whole

_MOST_COLUMNS = 62


class QueueKeywords(TypedDict, total=False):
    """The keyword options of a queue."""

    name: str
    stale: Stale
    rescored: Sequence[str]
    shuffle_seed: int | None
    shuffle_window: int
    max_samples: int | None
    max_memory: int | str | None
    max_keys: int | None
    spill: bool | str | PathLike[str]
    directory: str | PathLike[str] | None
    fsync: bool
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The options of a queue, where its constructor has the defaults; see `SampleQueue`.

    Raises:
        TypeError: An option is of a wrong kind.
        ValueError: It is out of range, or does not go with another.
    """

    columns: Sequence[str]
    name: str
    stale: Stale
    rescored: Sequence[str]
    shuffle_seed: int | None
    shuffle_window: int
    max_samples: int | None
    max_memory: int | str | None
    max_keys: int | None
    spill: bool | str | PathLike[str]
    directory: str | PathLike[str] | None
    fsync: bool
    lease_s: float

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among a constructor's arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is what the queue is called, not {self.name!r}")
        _check_columns("columns", self.columns)
        if not self.columns or len(self.columns) > _MOST_COLUMNS:
            raise ValueError(f"a queue has 1 to {_MOST_COLUMNS} columns, got {len(self.columns)}")
        if self.stale not in get_args(Stale):
            raise ValueError(f"stale is one of {', '.join(get_args(Stale))}, got {self.stale!r}")
        _check_columns("rescored", self.rescored)
        self.mask_of(self.rescored)
        if (self.stale == "rescore") != bool(self.rescored):
            raise ValueError("`rescored` names columns where stale='rescore', and only there")
        _check_whole("shuffle_seed", self.shuffle_seed, None)
        _check_whole("shuffle_window", self.shuffle_window, 2)
        _check_whole("max_samples", self.max_samples, 1)
        _check_whole("max_keys", self.max_keys, 1)
        if not isinstance(self.spill, bool | str | PathLike) or self.spill == "":
            raise TypeError(f"spill is True, False or a folder, not {self.spill!r}")
        if self.spill and self.max_memory is None:
            raise ValueError("`spill` goes with a bound on memory, `max_memory`")
        if self.spill and self.directory is not None:
            raise ValueError("a queue with a `directory` spills there: leave `spill` out")
        if self.fsync and self.directory is None:
            raise ValueError("`fsync` goes with a `directory`")
        if self.max_memory is not None:
            size_bytes("max_memory", self.max_memory)
        check_seconds("lease_s", self.lease_s)

    @property
    def max_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else size_bytes("max_memory", self.max_memory)

    def mask_of(self, columns: Sequence[str]) -> int:
        """The bits of some columns.

        Raises:
            ValueError: The queue has no such column.
        """
        if strange := [name for name in columns if name not in self.columns]:
            raise ValueError(f"{self.name} has no column {strange[0]!r}, but {', '.join(self.columns)}")
        return sum(2 << self.columns.index(name) for name in dict.fromkeys(columns))

    def names_of(self, mask: int) -> list[str]:
        """The columns of some bits."""
        return [name for i, name in enumerate(self.columns) if mask & (2 << i)]

    def ledger(self, keys: Keys) -> Ledger:
        """The ledger of such a queue that holds nothing."""
        order = order_of(self.shuffle_seed, self.shuffle_window)
        return Ledger(order, self.stale, self.mask_of(self.rescored), keys)

    @property
    def every(self) -> int:
        """The bits of a sample that has all columns."""
        return self.mask_of(self.columns) | WHOLE


def _check_columns(option: str, names: Any) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{option} is a sequence of names, as in [{names!r}]")
    if wrong := [name for name in names if not isinstance(name, str) or not name]:
        raise TypeError(f"{option} are names, which {wrong[0]!r} is not")
    if len(set(names)) < len(names):
        raise ValueError(f"{option} names a column twice: {', '.join(names)}")


def _check_whole(option: str, value: Any, least: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} is a whole number, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{option} is at least {least}, got {value}")


def count_of(name: str, value: Any, least: int) -> int:
    """An argument that is a whole number, also of numpy or torch, and not too small.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.
    """
    count = whole(name, value)
    _check_whole(name, count, least)
    return count


def check_seconds(name: str, value: Any) -> None:
    """Make sure that an argument is a number of seconds above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not value > 0:
        raise ValueError(f"{name} is above 0, got {value}")
