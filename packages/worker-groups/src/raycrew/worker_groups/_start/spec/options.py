"""The options of a group: one value, checked where it is made."""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from keyword import iskeyword
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, Self

from raycrew.worker_groups._health import check_folder
from raycrew.worker_groups._start.spec.sizes import size_bytes
from raycrew.worker_groups._worker import CommunicationOptions, check_env_vars
from raycrew.worker_groups.errors import WorkerFailureError
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider
from raycrew.worker_groups.sharding import NamedSharding, RankInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """The keyword options of a group's constructor, where their defaults are; see `RayWorkerGroup`.

    Raises:
        TypeError: An option is of a wrong kind.
        ValueError: It is out of range, or can't be had by any process.
    """

    sharding_annotations: NamedSharding | None
    init: Mapping[str, Any] | Callable[[RankInfo], Mapping[str, Any]] | None
    env_vars: Mapping[str, str] | Callable[[RankInfo], Mapping[str, str]] | None
    secrets: Sequence[str]
    launchers: Mapping[str, str | Sequence[str]] | None
    environments: EnvironmentProvider | Literal["auto"] | None
    transport: ArgumentTransport | Literal["auto"] | None
    enable_gradient_compression: bool
    async_communication: bool
    enable_load_balancing: bool
    load_balancing_strategy: str | Callable[[Sequence[Any], Any], int]
    idempotent_methods: Sequence[str]
    restart_on_failure: bool
    max_restarts: int | None
    min_workers: int | None
    standby: int
    preload: Sequence[str]
    spare_bundles: int
    on_worker_failure: Callable[[WorkerFailureError], object] | None
    memory_limit: int | str | None
    diagnose: bool | str | PathLike[str]
    init_timeout_s: float
    ports_per_worker: int
    port_range: tuple[int, int] | None
    progress: bool | None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among a constructor's arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        check_env_vars(self.variables, "env_vars")
        if self.init is not None and not callable(self.init):
            _check_named("init", self.init)
        if self.launchers is not None:
            _check_launchers(self.launchers)
        for name in ("secrets", "idempotent_methods"):
            _check_names(name, getattr(self, name))
        _check_number("init_timeout_s", self.init_timeout_s, math.ulp(0.0))
        self._check_restarts()
        self._check_reserve()
        if self.on_worker_failure is not None and not callable(self.on_worker_failure):
            raise TypeError(f"on_worker_failure is a function of the failure, not {self.on_worker_failure!r}")
        if self.memory_limit is not None:
            size_bytes("memory_limit", self.memory_limit)
        if not isinstance(self.diagnose, bool | str | PathLike) or self.diagnose == "":
            raise TypeError(f"diagnose is a folder, True or False, not {self.diagnose!r}")
        if not isinstance(self.diagnose, bool):
            check_folder("diagnose", self.diagnose)
        _check_number("ports_per_worker", self.ports_per_worker, 0, whole=True)
        if self.port_range is not None:
            _check_ports(self.port_range)

    def _check_restarts(self) -> None:
        for name, least in (("max_restarts", 0), ("min_workers", 1)):
            if (value := getattr(self, name)) is None:
                continue
            _check_number(name, value, least, whole=True)
            if value and not self.restart_on_failure:
                raise ValueError(f"{name}= is for groups with restart_on_failure=True")

    def _check_reserve(self) -> None:
        for name in ("standby", "spare_bundles"):
            _check_number(name, getattr(self, name), 0, whole=True)
        _check_modules("preload", self.preload)
        if self.preload and not self.standby:
            raise ValueError("preload= is for workers that stand by, and standby is 0")

    @property
    def n_restarts(self) -> int:
        """How often the group may be restarted by itself."""
        return 3 if self.max_restarts is None else self.max_restarts

    @property
    def variables(self) -> Mapping[str, str]:
        """`env_vars` that are the same for all workers."""
        return {} if self.env_vars is None or callable(self.env_vars) else self.env_vars

    @property
    def n_spare(self) -> int:
        """How many bundles the group has beside those of its ranks."""
        return self.standby + self.spare_bundles

    @property
    def memory_limit_bytes(self) -> int:
        """`memory_limit` in bytes; 0 for none."""
        return 0 if self.memory_limit is None else size_bytes("memory_limit", self.memory_limit)

    @property
    def communication(self) -> CommunicationOptions:
        """What workers are told of collective communication."""
        return CommunicationOptions(self.enable_gradient_compression, self.async_communication)


def _check_named(option: str, values: object) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(f"{option} is a mapping by name, or a function of the rank, not {kind_of(values)}")


def kind_of(values: object) -> str:
    """What is no mapping by name, in words; not what is in it, which may be confidential."""
    names = values if isinstance(values, Mapping) else ()
    others = sorted({type(name).__name__ for name in names if not isinstance(name, str)})
    return f"of type {type(values).__name__}" + (f" with keys of type {', '.join(others)}" if others else "")


def _check_launchers(launchers: object) -> None:
    if not isinstance(launchers, Mapping):
        raise TypeError(f"launchers are commands by pattern of workers' names, not {launchers!r}")
    for pattern, command in launchers.items():
        if not isinstance(pattern, str):
            raise TypeError(f"launchers are commands by pattern of workers' names, which {pattern!r} is not")
        words = _words_of(pattern, command) if isinstance(command, str) else command
        if not isinstance(words, Sequence) or not words or not all(isinstance(w, str) and w for w in words):
            raise TypeError(f"launchers[{pattern!r}] is a command or the list of its words, not {command!r}")
        if any("\0" in word for word in words):
            raise ValueError(f"launchers[{pattern!r}] has a null character, which no command can have")


def _words_of(pattern: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"launchers[{pattern!r}] is no command that a shell could read: {error}") from None


def _check_names(option: str, names: object) -> None:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"{option} is a sequence of names, as in [{names!r}]")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"{option} is a sequence of names, and has one of type {type(wrong[0]).__name__}")


def _check_modules(option: str, names: Collection[str]) -> None:
    _check_names(option, names)
    for name in names:
        if not all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
            raise ValueError(f"{option} is a sequence of modules' names, which {name!r} is not")


def _check_number(option: str, value: Any, least: float, *, whole: bool = False) -> None:
    kinds: Any = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{option} is a {'whole ' if whole else ''}number, not {value!r}")
    if not value >= least:
        bound = f"at least {least}" if whole else "above 0"
        raise ValueError(f"{option} is {value!r}; it has to be {bound}")


def _check_ports(port_range: Any) -> None:
    if not isinstance(port_range, Sequence) or len(port_range) != 2:
        raise TypeError(f"port_range is the first and the last port, not {port_range!r}")
    for port in port_range:
        _check_number("port_range", port, 1024, whole=True)  # as `lease_ports` has it, in a worker
    first, last = port_range
    if not first <= last <= 65535:
        raise ValueError(f"port_range is {port_range!r}; the first is at most the last, that at most 65535")
