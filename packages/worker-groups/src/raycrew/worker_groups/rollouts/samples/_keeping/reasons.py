"""Why a queue can't do something now, in words. Pure."""

from collections.abc import Mapping
from typing import Any

from raycrew.worker_groups.rollouts.samples._asking import Wanted, use_of
from raycrew.worker_groups.rollouts.samples._keeping.room import Room
from raycrew.worker_groups.rollouts.samples._keeping.tally import SampleStats
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._states import GOES_ON, NO_FLOOR, Ledger, Use


def why_not(
    options: QueueOptions,
    ledger: Ledger,
    room: Room,
    stats: SampleStats,
    operation: str,
    arguments: Mapping[str, Any],
) -> str:
    """Why an operation is not possible now."""
    if operation != "get":
        return why_not_put(options, stats, arguments["n"], room.n_before(arguments["ticket"]))
    wanted: Wanted = arguments["wanted"]
    use = use_of(options, wanted)
    floor = NO_FLOOR if wanted.max_staleness is None else ledger.version - wanted.max_staleness
    ready, of_any_age = (ledger.count(use, least) for least in (floor, NO_FLOOR))
    return why_not_get(options, stats, use, wanted.at_least, ready, of_any_age)


def why_not_put(options: QueueOptions, stats: SampleStats, n: int, n_before: int = 0) -> str:
    """Why there is no room, which `n_before` others wait for before."""
    others = f", and {n_before} others wait for room before" if n_before else ""
    return (
        f"{options.name} has no room for {n} samples more: it holds {stats.held} ({stats.leased} handed out, "
        f"{stats.partial} parts of rollouts) with {stats.in_memory_bytes} bytes in memory, bounded by "
        f"max_samples={options.max_samples} and max_memory={options.max_memory}{others}"
    )


def why_not_get(
    options: QueueOptions, stats: SampleStats, use: Use, at_least: int, ready: int, of_any_age: int
) -> str:
    """Why there are not enough samples."""
    what = "parts of rollouts" if use == GOES_ON else f"samples with {_columns(options, use.needs)}"
    lacking = f" and without {_columns(options, use.adds)}" if use.adds > 1 else ""
    return (
        f"{options.name} has {ready} of {at_least} {what}{lacking} that nobody has, and "
        f"{of_any_age - ready} more that are too old at version {stats.version}; it holds {stats.held}, "
        f"of which {stats.leased} are handed out"
    )


def in_vain(options: QueueOptions, wanted: Wanted, ready: int, held: int) -> str:
    """Why somebody who waits for samples may wait for ever."""
    return (
        f"{options.name} is full, so that nobody can put any more, and only {ready} of the {held} samples "
        f"that it holds are for a get() of at least {wanted.at_least} with max_staleness="
        f"{wanted.max_staleness}, which waits: get fewer, have more room (max_samples, max_memory), or have "
        "those that are too old dropped (stale='drop', discard())"
    )


def _columns(options: QueueOptions, mask: int) -> str:
    return ", ".join(options.names_of(mask)) or "any column"
