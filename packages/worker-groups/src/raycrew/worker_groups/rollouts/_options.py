"""The options of a pool and of a collection, checked where they are made."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, Self, get_args

from ray import cloudpickle

from raycrew.worker_groups.rollouts._engine import Bounds, OnError
from raycrew.worker_groups.rollouts._in_worker import check_coroutine

#: Options of the group that the pool sets itself.
_OWN = frozenset(
    {
        *("init", "name_prefix", "enable_load_balancing", "load_balancing_strategy", "idempotent_methods"),
        *("restart_on_failure", "max_restarts", "min_workers", "sharding_annotations"),
    }
)
_PATH = re.compile(r"\w+(\.\w+)*[.:]\w+(\.\w+)*")
_MOST_PER_WORKER = 1000
"""Of what Ray runs at a time in an actor with coroutines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """The options of a pool, where its constructor has the defaults; see `RolloutPool`.

    Raises:
        TypeError: One is of a wrong kind.
        ValueError: It is out of range.
    """

    rollout: Any
    state: Any
    samples_per_prompt: int
    deadline_s: float | None
    cancel_grace_s: float
    retries: int
    retry_errors: bool
    on_error: OnError
    in_flight_per_worker: int
    max_in_flight: int | None
    max_restarts: int
    name: str
    group: Mapping[str, Any]

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among a constructor's arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        _check_code(self.rollout, self.state)
        _check_whole("samples_per_prompt", self.samples_per_prompt, 1)
        if self.deadline_s is not None:
            _check_seconds("deadline_s", self.deadline_s)
        _check_seconds("cancel_grace_s", self.cancel_grace_s)
        _check_whole("retries", self.retries, 0)
        if not isinstance(self.retry_errors, bool):
            raise TypeError(f"retry_errors is True or False, not {self.retry_errors!r}")
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error is one of {', '.join(get_args(OnError))}, got {self.on_error!r}")
        _check_whole("in_flight_per_worker", self.in_flight_per_worker, 1)
        if self.in_flight_per_worker > _MOST_PER_WORKER:
            raise ValueError(f"in_flight_per_worker is at most {_MOST_PER_WORKER}")
        if self.max_in_flight is not None:
            _check_whole("max_in_flight", self.max_in_flight, 1)
        _check_whole("max_restarts", self.max_restarts, 0)
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is what the pool is called, not {self.name!r}")
        if not isinstance(self.group, Mapping):
            raise TypeError(f"group is a mapping of options of the worker group, not {self.group!r}")
        if own := sorted(_OWN & set(self.group)):
            raise ValueError(f"the pool sets its group's {own[0]} itself")

    @property
    def code(self) -> bytes:
        """What the workers run.

        Raises:
            TypeError: It can't be pickled.
        """
        try:
            return bytes(cloudpickle.dumps((self.rollout, self.state)))  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever holds it raises
            raise TypeError(f"the rollout or its state can't be pickled: {error}") from error

    def bounds(self, n_workers: int) -> Bounds:
        """How much there is at a time."""
        all_workers = n_workers * self.in_flight_per_worker
        enough = 2 * -(-all_workers // self.samples_per_prompt)
        return Bounds(self.samples_per_prompt, self.in_flight_per_worker, self.max_in_flight or enough)

    def of_collection(self, *, has_ids: bool, has_file: bool, has_queue: bool) -> dict[str, Any]:
        """What has to be the same when a collection goes on in a folder."""
        to = [name for name, is_there in (("a file", has_file), ("a queue", has_queue)) if is_there]
        return {
            "rollout": name_of(self.rollout),
            "samples_per_prompt": self.samples_per_prompt,
            "ids": "given" if has_ids else "positions",
            "destination": " and ".join(to) or "the iteration alone",
        }


def name_of(rollout: Any) -> str:
    """What a coroutine function is called."""
    if isinstance(rollout, str):
        return rollout.replace(":", ".")
    function = getattr(rollout, "func", rollout)
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def path_of(name: str, value: Any) -> Path | None:
    """A path.

    Raises:
        TypeError: It is none.
    """
    if value is None:
        return None
    try:
        return Path(value)
    except TypeError:
        raise TypeError(f"{name} is a path, not {value!r}") from None


def _check_code(rollout: Any, state: Any) -> None:
    for name, value in (("rollout", rollout), ("state", state)):
        if isinstance(value, str) and not _PATH.fullmatch(value):
            raise ValueError(f"{name} is an import path like 'package.module:name', not {value!r}")
    if not isinstance(rollout, str):
        check_coroutine(rollout)
    if state is not None and not isinstance(state, str) and not callable(state):
        raise TypeError(f"state is what makes a worker's state, or an import path of it, not {state!r}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value < inf:
        raise ValueError(f"{name} is above 0 and finite, got {value}")
