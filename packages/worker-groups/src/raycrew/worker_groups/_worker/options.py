"""Which Ray options and which environment each worker gets, and who has the last word; pure."""

import fnmatch
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycrew.cluster_core import RayConnection, Secrets

#: Options that decide where a worker is and how long it lives belong to its group.
GROUP_OPTIONS = frozenset(
    {
        "name", "namespace", "get_if_exists", "lifetime", "max_restarts", "scheduling_strategy",
        "placement_group", "placement_group_bundle_index", "placement_group_capture_child_tasks",
    }
)  # fmt: skip

#: Read by the loader, the interpreter or a library before any call can reach the process.
PROCESS_VARIABLES = ("LD_*", "PYTHON*", "MALLOC_*", "GLIBC_*", "*_NUM_THREADS", "KMP_*", "RAY_*")


@dataclass(frozen=True, slots=True)
class Configured:
    """What `configure_worker` answered for one worker."""

    resources: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Everything that one worker is started with.

    Attributes:
        actor: Ray actor options.
        env_vars: Variables that reach the worker by a call, before its class is imported.
        init_kwargs: Keyword arguments of its `__init__`.
        overridden: Names of what the worker's own `configure_worker` changed, for the log.
    """

    actor: Mapping[str, Any]
    env_vars: Mapping[str, str]
    init_kwargs: Mapping[str, Any]
    overridden: tuple[str, ...] = ()


def read_configured(answer: Any, who: str) -> Configured:
    """Check the tuple that `configure_worker` returned.

    Raises:
        TypeError: It is not `(resources, env_vars, init_kwargs)` with or without `runtime_env`, or a variable
            is None.
    """
    if answer is None:
        return Configured()
    if not isinstance(answer, tuple) or len(answer) not in (3, 4):
        raise TypeError(
            f"{who}.configure_worker must return (resources, env_vars, init_kwargs[, runtime_env])"
        )
    parts = [{} if part is None else part for part in answer]
    for name, part in zip(("resources", "env_vars", "init_kwargs", "runtime_env"), parts, strict=False):
        if not isinstance(part, Mapping):
            raise TypeError(f"{who}.configure_worker: {name} is a {type(part).__name__}, not a mapping")
    if unset := [name for name, value in parts[1].items() if value is None]:
        raise TypeError(f"{who}.configure_worker: env_vars[{unset[0]!r}] is None, which no variable can be")
    parts[1] = {str(name): str(value) for name, value in parts[1].items()}
    return Configured(*parts)


def check_env_vars(variables: Mapping[str, str], who: str) -> dict[str, str]:
    """A copy of variables that any process can have.

    Raises:
        TypeError: It is no mapping of strings to strings.
        ValueError: A name is empty or has a "=", or a name or value has what no environment can hold.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(f"{who} is a mapping of names to values, not a {type(variables).__name__}")
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{who} are strings, not {name!r}: a {type(value).__name__}")
        if not name or "=" in name:
            raise ValueError(f"{who}: {name!r} can't be the name of a variable")
        if "\0" in name + value:
            raise ValueError(f"{who}: {name!r} or its value has a null character")
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError:
            raise ValueError(f"{who}: {name!r} or its value can't be encoded for an environment") from None
    return dict(variables)


def pick_secrets(names: Sequence[str], environ: Mapping[str, str]) -> Secrets:
    """The values of secrets: of `init_ray(secrets=…)`, of variables that hold credentials, and by name.

    Raises:
        TypeError: `names` is one string.
        ValueError: A name is not set, or no environment can hold one or its value.
    """
    if isinstance(names, str):
        raise TypeError(f"secrets is a sequence of names, as in ({names!r},)")
    if missing := [name for name in names if name not in environ]:
        raise ValueError(f"secrets {missing} are not set in this environment")
    found = {name: environ[name] for name in names}
    if (connection := RayConnection.current()) is not None:
        found = {**connection.secrets, **connection.policy.confidential(environ), **found}
    return Secrets(check_env_vars(found, "secrets"))


def is_process_variable(name: str) -> bool:
    """Whether a variable only counts when it is there from the start of the process."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in PROCESS_VARIABLES)


def merge_options(
    class_options: Mapping[str, Any],
    caller_options: Mapping[str, Any],
    configured: Configured,
    placement: Mapping[str, Any],
    *,
    forwarded: Mapping[str, str] | None = None,
    env_vars: Mapping[str, str] | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    py_executable: str | None = None,
    launcher: Sequence[str] = (),
) -> WorkerOptions:
    """Merge options; the later has the last word: class < placement's share < caller < `configure_worker`.

    Of variables: what the driver forwards < `env_vars` of a runtime environment < the caller's `env_vars` <
    `configure_worker`.

    Where a worker is placed is always the placement's word. A caller or worker may take less than its
    bundle's share of a resource (zero GPUs, say, to leave the device to its own children), not more.

    Raises:
        ValueError: More is asked for than the bundle's share, which no wait would ever grant.
    """
    chosen = {k: v for k, v in {**class_options, **caller_options}.items() if v is not None}
    runtime_envs = [chosen.pop("runtime_env", {}), configured.runtime_env]
    own = {k: v for k, v in chosen.items() if k not in GROUP_OPTIONS}
    asked = {
        **_resources({**class_options}, placement),
        **_resources(caller_options),
        **_resources(configured.resources),
    }
    _check_share(asked, placement)
    actor = {**own, **placement, **asked}
    if "resources" in asked:
        actor["resources"] = {**placement.get("resources", {}), **asked["resources"]}
    variables = {
        **_unnamed(forwarded or {}, runtime_envs),
        **(env_vars or {}),
        **check_env_vars(configured.env_vars, "configure_worker's env_vars"),
    }
    actor["runtime_env"] = _runtime_env(runtime_envs, variables, py_executable, launcher)
    overridden = _overridden(caller_options, env_vars or {}, init_kwargs or {}, configured)
    return WorkerOptions(
        actor if actor["runtime_env"] else {k: v for k, v in actor.items() if k != "runtime_env"},
        {k: v for k, v in variables.items() if not is_process_variable(k)},
        {**(init_kwargs or {}), **configured.init_kwargs},
        overridden,
    )


def _resources(options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The resource requests among options; those that `defaults` answers are left to it."""
    names = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")
    found = {k: options[k] for k in names if options.get(k) is not None}
    return {k: v for k, v in found.items() if defaults is None or k not in defaults}


def _check_share(asked: Mapping[str, Any], placement: Mapping[str, Any]) -> None:
    shares = {**placement, **placement.get("resources", {})}
    for name, amount in {**asked, **asked.get("resources", {})}.items():
        share = shares.get(name)
        if isinstance(share, int | float) and amount > share:
            raise ValueError(
                f"{name}={amount} is more than the worker's share of its bundle, {share}; "
                "give the cluster larger bundles"
            )


def _runtime_env(
    given: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    py_executable: str | None,
    launcher: Sequence[str],
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    from_start: dict[str, str] = {}
    for runtime_env in given:
        from_start |= check_env_vars(runtime_env.get("env_vars") or {}, "env_vars of a runtime_env")
        merged |= {k: v for k, v in runtime_env.items() if k != "env_vars"}
    from_start |= {k: v for k, v in variables.items() if is_process_variable(k)}
    if py_executable is not None:
        merged["py_executable"] = py_executable
    if launcher:  # Ray has a shell start this
        python = merged.get("py_executable") or shlex.quote(sys.executable)
        merged["py_executable"] = f"{shlex.join(launcher)} {python}"
    return {**merged, "env_vars": from_start} if from_start else merged


def _unnamed(forwarded: Mapping[str, str], runtime_envs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the driver forwards, without what somebody has said of the workers' own environment."""
    named = {name for runtime_env in runtime_envs for name in runtime_env.get("env_vars") or {}}
    return {name: value for name, value in forwarded.items() if name not in named}


def _overridden(
    caller: Mapping[str, Any], env_vars: Mapping[str, str], init_kwargs: Mapping[str, Any], own: Configured
) -> tuple[str, ...]:
    pairs = ((caller, own.resources), (env_vars, own.env_vars), (init_kwargs, own.init_kwargs))
    return tuple(k for theirs, ours in pairs for k in ours if k in theirs and theirs[k] != ours[k])
