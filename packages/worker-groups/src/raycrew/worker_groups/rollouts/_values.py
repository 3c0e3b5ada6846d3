"""What goes between a pool, its workers and whoever collects: values. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["raised", "late", "lost", "stuck"]


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """What a rollout returns for a `SampleQueue`.

    Attributes:
        columns: Some of the queue's columns, each with the sample's row.
        version: The version of the weights that made it.
        length: How many tokens it has, for the versions of tokens; None where nobody asks for these.
    """

    columns: Mapping[str, Any]
    version: int
    length: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """Why there is no sample.

    Attributes:
        kind: "raised" (the coroutine did), "late" (it ran past its deadline) or "lost" (its process died).
        message: What happened, with the traceback of what was raised.
        attempts: How often it was tried.
    """

    kind: Literal["raised", "late", "lost"]
    message: str
    attempts: int


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one prompt.

    Attributes:
        id: Of the prompt.
        prompt: It.
        samples: What each rollout has returned, in order; None in the place of one that failed.
        failures: Those, by their places among the samples.
    """

    id: str
    prompt: Any
    samples: Sequence[Any]
    failures: Mapping[int, RolloutFailure]


class CurrentRollout(NamedTuple):
    """Which rollout the running coroutine is of.

    Attributes:
        id: Of its prompt.
        sample: Which of the prompt's rollouts it is, from 0 on.
        attempt: Which attempt it is, from 0 on.
    """

    id: str
    sample: int
    attempt: int


class Call(NamedTuple):
    """What a worker is asked.

    Attributes:
        which: The rollout.
        prompt: Pickled.
        deadline_s: How long it may take; None for as long as it takes.
        grace_s: How long it may take to end once it was cancelled.
        is_fresh: Whether a state is made for it alone.
        end_s: After how long its process ends itself, should nobody else have ended it.
    """

    which: CurrentRollout
    prompt: bytes
    deadline_s: float | None
    grace_s: float
    is_fresh: bool
    end_s: float | None = None


class Wishes(NamedTuple):
    """What a collection wants of results.

    Attributes:
        is_json: Whether they are to go to a file of JSON.
        columns: Those of the queue that they are to go to; None for no queue.
    """

    is_json: bool = False
    columns: tuple[str, ...] | None = None


class Outcome(NamedTuple):
    """What became of an attempt.

    Attributes:
        data: What was returned, pickled; nothing where it failed.
        text: The same as JSON, where that is wanted.
        kind: How it failed, if it did: "stuck" is late, and does not end.
        message: How that came.
    """

    data: bytes = b""
    text: str = ""
    kind: Kind | None = None
    message: str = ""
