"""Which weights made which tokens of a sample: runs of one version each. Pure."""

from collections.abc import Sequence
from itertools import chain, repeat
from operator import index
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
    try:
        found = whole("a version", number)
    except TypeError:
        raise TypeError(
            f"a version is a whole number, or what holds weights of one, not {version!r}"
        ) from None
    if found < 0:
        raise ValueError(f"a version is not negative, got {found}")
    return found


def whole(name: str, value: Any) -> int:
    """A whole number, also of numpy or torch, as an int.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    return index(value)


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
    made = tuple(run for run in runs if run.length)
    added = length - sum(run.length or 0 for run in runs)
    if added < 0:
        raise ValueError(f"a rollout had {length - added} tokens before, and has {length} now")
    if not added:
        return runs
    if made and made[-1].version == version:
        return (*made[:-1], VersionRun(version, (made[-1].length or 0) + added))
    return (*made, VersionRun(version, added))


def oldest(runs: Runs) -> int:
    """The oldest version that has made a token; where there is none yet, the oldest of all."""
    return min(run.version for run in [run for run in runs if run.length != 0] or runs)


def per_token(runs: Runs) -> list[int]:
    """The version of each token.

    Raises:
        ValueError: Nobody has said how many tokens there are.
    """
    if any(run.length is None for run in runs):
        raise ValueError("how many tokens each version has made is known of samples put with `lengths`")
    return list(chain.from_iterable(repeat(run.version, run.length or 0) for run in runs))
