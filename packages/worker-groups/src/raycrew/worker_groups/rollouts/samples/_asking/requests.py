"""What is asked of a queue: checked, and with rows encoded, before it is sent. Pure but for the encoding."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raycrew.worker_groups.protocols import WeightVersions
from raycrew.worker_groups.rollouts.samples._asking.codec import encode
from raycrew.worker_groups.rollouts.samples._options import QueueOptions, check_seconds, count_of
from raycrew.worker_groups.rollouts.samples._states import GOES_ON, WHOLE, Runs, Use, number_of, whole
from raycrew.worker_groups.rollouts.samples._storage import Held, Row


class Request(NamedTuple):
    """An operation of a `Keeper`.

    Attributes:
        operation: Its name.
        arguments: What it is called with.
        holder: What holds the newest weights: their version counts each time that the operation is tried.
    """

    operation: str
    arguments: Mapping[str, Any]
    holder: WeightVersions | None = None

    def current(self) -> Mapping[str, Any]:
        """The arguments, as of now."""
        if self.holder is None:
            return self.arguments
        return {"wanted": self.arguments["wanted"]._replace(version=number_of(self.holder))}

    @property
    def ticket(self) -> str | None:
        """Who waits for room, if that is what is waited for."""
        return self.arguments.get("ticket")

    def __reduce__(self) -> tuple[Any, ...]:
        return Request, (self.operation, self.current())


Columns = Mapping[str, Sequence[Row]]


def only(
    positions: Sequence[int], columns: Columns, lengths: Sequence[int] | None
) -> tuple[Columns, list[int] | None]:
    """Some samples of a put."""
    chosen = {name: [rows[i] for i in positions] for name, rows in columns.items()}
    return chosen, None if lengths is None else [lengths[i] for i in positions]


class Handed(NamedTuple):
    """Samples as they are handed out.

    Attributes:
        ids: Their numbers.
        runs: Which version has made which tokens.
        behind: How many versions each is behind, counted from when it was last scored.
        rows: By column.
    """

    ids: list[int]
    runs: list[Runs]
    behind: list[int]
    rows: dict[str, list[Row]]


class Wanted(NamedTuple):
    """What somebody asks for.

    Attributes:
        lease: The name that the lease will have.
        n: How many samples.
        at_least: How many will do.
        columns: The columns that samples must have, and whose rows are wanted; None for all that are there.
        adds: The columns that they must lack.
        is_to_go_on: Whether these are parts of rollouts.
        max_staleness: How many versions they may be behind; None for any.
        version: A version that there is.
        lease_s: How long the lease lasts.
    """

    lease: str
    n: int
    at_least: int
    columns: Sequence[str] | None
    adds: Sequence[str]
    is_to_go_on: bool
    max_staleness: int | None
    version: int
    lease_s: float


def putting(
    options: QueueOptions,
    columns: Any,
    version: Any,
    lengths: Sequence[int] | None,
    *,
    partial: bool,
    keys: Sequence[str] | None = None,
) -> Request:
    """To put new samples.

    Raises:
        TypeError: See `SampleQueue.put`.
        ValueError: See `SampleQueue.put`.
    """
    encoded, n = _encoded(options, columns)
    if lengths is not None:
        lengths = checked_lengths(lengths, n)
    elif partial:
        raise ValueError("parts of rollouts need `lengths`: how many tokens each has so far")
    arguments: dict[str, Any] = {"columns": encoded, "version": number_of(version)}
    arguments |= {"lengths": lengths, "n": n, "ticket": uuid.uuid4().hex}
    if keys is not None:
        arguments["keys"] = names = checked_keys(keys)
        if len(names) != n or len(set(names)) < n:
            raise ValueError(f"{n} samples have {n} different keys, not {names[:8]}")
    return Request("put", {**arguments, "is_whole": not partial})


def checked_keys(keys: Any) -> list[str]:
    """The keys of samples.

    Raises:
        TypeError: They are no sequence of strings, or one is empty.
    """
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(f"keys are a sequence of strings, not {keys!r}")
    checked = list(keys)
    if wrong := [key for key in checked if not isinstance(key, str) or not key]:
        raise TypeError(f"a key is a string that is not empty, not {wrong[0]!r}")
    return checked


def adding(
    options: QueueOptions, ids: Sequence[int], columns: Any, version: Any, lease: str | None = None
) -> Request:
    """To add columns to samples.

    Raises:
        TypeError: See `SampleQueue.add`.
        ValueError: See `SampleQueue.add`.
    """
    ids = checked_ids(ids)
    encoded = _for_samples(options, ids, columns)
    number = None if version is None else number_of(version)
    if number is None and (scored := [name for name in encoded if name in options.rescored]):
        raise ValueError(
            f"{', '.join(scored)}: scored anew where they are too old, so `version` has to be said"
        )
    arguments = {"ids": ids, "columns": encoded, "version": number, "lease": lease}
    return Request("add", arguments)


def going_on(
    options: QueueOptions,
    ids: Sequence[int],
    columns: Any,
    version: Any,
    lengths: Sequence[int],
    lease: str,
    *,
    partial: bool,
) -> Request:
    """To put rollouts in place of their parts.

    Raises:
        TypeError: See `SampleBatch.put`.
        ValueError: See `SampleBatch.put`.
    """
    arguments = {
        "ids": list(ids),
        "columns": _for_samples(options, ids, columns),
        "version": number_of(version),
    }
    more = {"lengths": checked_lengths(lengths, len(ids)), "lease": lease, "is_whole": not partial}
    return Request("go_on", {**arguments, **more})


def getting(
    options: QueueOptions,
    n: int,
    *,
    at_least: int | None = None,
    columns: Sequence[str] | None = None,
    adds: Sequence[str] = (),
    is_to_go_on: bool = False,
    max_staleness: int | None = None,
    version: Any = None,
    lease_s: float | None = None,
) -> Request:
    """To get samples.

    Raises:
        TypeError: See `SampleQueue.get`.
        ValueError: See `SampleQueue.get`.
    """
    n = count_of("batch", n, 1)
    if at_least is not None:
        at_least = count_of("at_least", at_least, 1)
        if at_least > n:
            raise ValueError(f"at_least={at_least} is more than the whole batch of {n}")
    if max_staleness is not None:
        max_staleness = count_of("max_staleness", max_staleness, 0)
    if options.max_samples is not None and min(n, at_least or n) > options.max_samples:
        raise ValueError(
            f"there never are {min(n, at_least or n)} samples: max_samples={options.max_samples}"
        )
    if lease_s is not None:
        check_seconds("lease_s", lease_s)
    columns, adds = None if columns is None else _names(options, columns), _names(options, adds)
    if both := set(columns or ()) & set(adds):
        raise ValueError(f"samples can't both have and lack {sorted(both)[0]!r}")
    wanted = Wanted(
        uuid.uuid4().hex,
        n,
        min(n, at_least or n),
        columns,
        adds,
        is_to_go_on,
        max_staleness,
        0 if version is None else number_of(version),
        lease_s or options.lease_s,
    )
    return Request("get", {"wanted": wanted}, version if isinstance(version, WeightVersions) else None)


def _names(options: QueueOptions, columns: Iterable[str]) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise TypeError(f"columns are a sequence of names, as in [{columns!r}]")
    names = tuple(columns)
    options.mask_of(names)
    return names


def use_of(options: QueueOptions, wanted: Wanted) -> Use:
    """What somebody wants samples for."""
    if wanted.is_to_go_on:
        return GOES_ON
    adds = options.mask_of(wanted.adds)
    if wanted.columns is not None:
        return Use(options.mask_of(wanted.columns) | WHOLE, adds)
    return Use(WHOLE if adds else options.every, adds)


def checked_lengths(lengths: Sequence[int], n: int) -> list[int]:
    """How many tokens samples have.

    Raises:
        TypeError: One is no whole number.
        ValueError: There are more or fewer than samples, or one is negative.
    """
    if len(lengths) != n:
        raise ValueError(f"lengths has {len(lengths)} numbers for {n} samples")
    return [count_of("a length", length, 0) for length in lengths]


def checked_ids(ids: Iterable[int]) -> list[int]:
    """The numbers of samples.

    Raises:
        TypeError: One is no whole number.
        ValueError: One is named twice.
    """
    checked = [whole("the number of a sample", i) for i in ids]
    if len(set(checked)) < len(checked):
        raise ValueError("a sample is named twice")
    return checked


def _encoded(options: QueueOptions, columns: Any) -> tuple[dict[str, list[Row]], int]:
    encoded, n = encode(columns)
    options.mask_of(list(encoded))
    if options.directory is not None:
        for name, rows in encoded.items():
            if any(isinstance(row, Held) for row in rows):
                raise TypeError(
                    f"column {name!r} has handles, which may outlive what they stand for in the folder of "
                    f"{options.name}: put the values themselves"
                )
    return encoded, n


def _for_samples(options: QueueOptions, ids: Sequence[int], columns: Any) -> dict[str, list[Row]]:
    encoded, n = _encoded(options, columns)
    if n != len(ids):
        raise ValueError(f"columns have {n} rows for {len(ids)} samples")
    return encoded
