"""Which weights made which tokens of a sample: runs of one version each. Pure."""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from raycrew.worker_groups.protocols import WeightVersions


class VersionRun(NamedTuple):
    """Some tokens of a sample, one after another, that one version of the weights has made.

    Attributes:
        version: Of the weights.
        length: How many tokens; None where nobody has said.
    """

    version: int
    length: int | None


Runs = tuple[VersionRun, ...]


def number_of(version: Any) -> int:
    """A version as a number, also of what holds weights.

    Raises:
        TypeError: It is neither.
        ValueError: It is negative, or what holds weights holds none yet.
    """
    number = version.version if isinstance(version, WeightVersions) else version
    if number is None:
        raise ValueError(f"{version!r} holds no version of the weights yet")
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"a version is a whole number, or what holds weights of one, not {version!r}")
    if number < 0:
        raise ValueError(f"a version is not negative, got {number}")
    return number


def first_runs(version: int, lengths: Sequence[int] | None, n: int) -> list[Runs]:
    """The runs of `n` new samples."""
    if lengths is None:
        return [(VersionRun(version, None),)] * n
    return [(VersionRun(version, length),) for length in lengths]


def extended(runs: Runs, version: int, length: int) -> Runs:
    """The runs of a sample that was `runs`, and has `length` tokens in all now.

    Raises:
        ValueError: It had more before, or nobody has said how many.
    """
    if any(run.length is None for run in runs):
        raise ValueError("a rollout that goes on needs `lengths` from its first part on")
    added = length - sum(run.length or 0 for run in runs)
    if added < 0:
        raise ValueError(f"a rollout had {length - added} tokens before, and has {length} now")
    last = runs[-1]
    if last.version == version:
        return (*runs[:-1], VersionRun(version, (last.length or 0) + added))
    return (*runs, VersionRun(version, added)) if added else runs


def oldest(runs: Runs) -> int:
    """The oldest version that has made a token."""
    return min(run.version for run in runs)


def per_token(runs: Runs) -> list[int]:
    """The version of each token.

    Raises:
        ValueError: Nobody has said how many tokens there are.
    """
    if any(run.length is None for run in runs):
        raise ValueError("how many tokens each version has made is known of samples put with `lengths`")
    return list(chain.from_iterable(repeat(run.version, run.length or 0) for run in runs))
