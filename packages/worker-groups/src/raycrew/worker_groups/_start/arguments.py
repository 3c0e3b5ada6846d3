"""What a caller gives to workers: arguments, variables and launchers, for all of them or for each rank."""

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from raycrew.cluster_core import Bundle, Cluster, RayConnection
from raycrew.worker_groups._calls import refuse_stream
from raycrew.worker_groups._start.spec import GroupSpec, check_init, kind_of
from raycrew.worker_groups._worker import ClassInfo, WorkerOptions, check_env_vars, is_process_variable
from raycrew.worker_groups.sharding import RankInfo


def bundles_of(cluster: object) -> Sequence[Bundle]:
    """The bundles of what a group is to be placed on.

    Raises:
        TypeError: It is no cluster.
    """
    if isinstance(cluster, type) or not isinstance(cluster, Cluster):
        given = f"the class {cluster.__name__}" if isinstance(cluster, type) else kind_of(cluster)
        raise TypeError(
            f"a group is placed on a cluster, as RayVirtualCluster([8]) makes one, not on {given}; "
            "the cluster is the first argument, the worker the second"
        )
    return cluster.bundles


def init_kwargs_of(spec: GroupSpec, rank: RankInfo | None = None) -> dict[str, Any]:
    """The keyword arguments of `__init__`, of whichever place they were given in.

    Args:
        spec: What the group is to be.
        rank: Of which rank; None for what is the same for all.

    Raises:
        TypeError: An argument is given in two places, or a function does not give a mapping.
    """
    init = spec.options.init
    own: Mapping[str, Any] = {} if init is None else init if isinstance(init, Mapping) else {}
    if callable(init) and rank is not None:
        own = _asked(init, rank, "init")
    places = {"RayWorkerBuilder": spec.builder.kwargs, "init": own, "the group's": spec.init_kwargs}
    given: dict[str, str] = {}
    for place, kwargs in places.items():
        for name in kwargs:
            if name in given:
                raise TypeError(f"argument {name!r} of __init__ is given twice: {given[name]} and {place}")
            given[name] = place
    return {**spec.builder.kwargs, **own, **spec.init_kwargs}


def check_arguments(spec: GroupSpec, info: ClassInfo, kwargs: Mapping[str, Any], *, whole: bool) -> None:
    """Check arguments against a worker class's `__init__`.

    Args:
        spec: What the group is to be.
        info: The worker class.
        kwargs: The keyword arguments.
        whole: Whether these are all of them.

    Raises:
        TypeError: They don't fit, or an option of the group is misspelt.
    """
    args = spec.builder.args
    check_init(info, args, kwargs, loose=spec.init_kwargs, whole=whole)
    for value in (*args, *kwargs.values()):
        refuse_stream(value)


def of_each_rank(
    spec: GroupSpec,
    info: ClassInfo,
    options: Sequence[WorkerOptions],
    order: Sequence[int],
    ranks: Sequence[RankInfo],
    starting: Collection[int],
) -> list[WorkerOptions]:
    """What each position's worker is told, once it is known which rank it has.

    Args:
        spec: What the group is.
        info: The worker class.
        options: What is known of each position before.
        order: Positions in rank order.
        ranks: The ranks.
        starting: Positions whose workers are to be constructed.

    Raises:
        TypeError: A function gives something else than a mapping, or arguments don't fit `__init__`.
        ValueError: A variable can't be set, or not for one rank alone.
    """
    told, wishes = list(options), spec.options
    for rank, position in zip(ranks, order, strict=True):
        worker, configured = options[position], info.configured[position]
        if callable(wishes.env_vars):
            own = _variables(wishes.env_vars, rank)
            worker = replace(worker, env_vars={**worker.env_vars, **own, **configured.env_vars})
        if callable(wishes.init) and position in starting:
            kwargs = {**init_kwargs_of(spec, rank), **configured.init_kwargs}
            check_arguments(spec, info, kwargs, whole=True)
            worker = replace(worker, init_kwargs=kwargs)
        told[position] = worker
    return told


def _variables(env_vars: Callable[[RankInfo], Mapping[str, str]], rank: RankInfo) -> dict[str, str]:
    own = check_env_vars(_asked(env_vars, rank, "env_vars"), f"env_vars of rank {rank.rank}")
    if early := [name for name in own if is_process_variable(name)]:
        raise ValueError(
            f"env_vars of rank {rank.rank}: {early[0]} counts only from the start of a process, "
            "when there is no rank yet; give it to all workers, or have configure_worker do it"
        )
    return own


def _asked(function: Callable[[RankInfo], Any], rank: RankInfo, what: str) -> Mapping[str, Any]:
    try:
        answer = function(rank)
    except Exception as error:
        error.add_note(f"(while {what} was asked for rank {rank.rank})")
        raise
    if not isinstance(answer, Mapping) or not all(isinstance(name, str) for name in answer):
        raise TypeError(f"{what} of rank {rank.rank} is to be a mapping by name, not {kind_of(answer)}")
    return answer


def forwarded_now() -> dict[str, str]:
    """Variables of this process that the connection's policy forwards, as they are now.

    Those that count only from the start of a process are left to the connection unless they have changed
    since, because they make a runtime environment necessary.
    """
    connection = RayConnection.current()
    if connection is None:
        return {}
    before, now = connection.forwarded, connection.policy.forwarded(os.environ)
    return {k: v for k, v in now.items() if not is_process_variable(k) or before.get(k) != v}


def launcher_of(launchers: Mapping[str, str | Sequence[str]] | None, alias: str) -> tuple[str, ...]:
    """The command that a worker of this name is started by: that of the first pattern that fits."""
    for pattern, command in (launchers or {}).items():
        if fnmatchcase(alias, pattern):
            return tuple(shlex.split(command) if isinstance(command, str) else command)
    return ()


def check_launchers(launchers: Mapping[str, str | Sequence[str]] | None, aliases: Sequence[str]) -> None:
    """Check that each pattern of `launchers` fits the name of a worker.

    Raises:
        ValueError: One does not.
    """
    for pattern in launchers or {}:
        if not any(fnmatchcase(alias, pattern) for alias in aliases):
            names = ", ".join([*aliases[:8], *(["…"] if len(aliases) > 8 else [])])
            raise ValueError(f"launchers: no worker's name is like {pattern!r}; they are {names}")
