"""What a role is to be: how many workers, what each is given, and where; frozen values, checked when made."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

from raycrew.worker_groups._start import size_bytes
from raycrew.worker_groups._worker import check_env_vars

StrategyType = Literal["shared", "separate", "deferred", "separation", "colocation"]

_GIB = 1 << 30
_ROLE = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSpec:
    """What one worker is given.

    Attributes:
        cpu: CPUs.
        gpu: Accelerators, of whichever kind the cluster has: a part of one, or whole ones.
        mem: Memory that Ray counts for it: a number of GiB, or a text such as "512MB".
        env_vars: Variables that it has before an engine's class is imported.
        port_count: Ports that it leases from its start.
        port_names: Names of the first of them.
        cmd: Command that starts its interpreter, such as `["nsys", "profile"]`, or its words as one text.
        environment: Fully qualified name of a class whose Python environment it runs in, its engine's, say;
            the scheduler's `environments` know which that is. By default that of `RayRPCServer`.

    Raises:
        TypeError: An attribute is of a wrong kind.
        ValueError: It is out of range, or can't be had by any process.
    """

    cpu: float = 1
    gpu: float = 0
    mem: float | str = 0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    port_count: int = 2
    port_names: Sequence[str] = ()
    cmd: str | Sequence[str] | None = None
    environment: str = ""

    def __post_init__(self) -> None:
        _check_amount("cpu", self.cpu)
        _check_amount("gpu", self.gpu)
        if not isinstance(self.mem, str):
            _check_amount("mem", self.mem)
        _check_count("port_count", self.port_count, 0)
        object.__setattr__(self, "env_vars", check_env_vars(self.env_vars, "env_vars"))
        object.__setattr__(self, "port_names", _names("port_names", self.port_names))
        if len(self.port_names) > self.port_count:
            raise ValueError(f"{len(self.port_names)} port_names for {self.port_count} ports")
        if self.gpu > 1 and self.gpu != int(self.gpu):
            raise ValueError(f"gpu={self.gpu} accelerators are neither a part of one nor whole ones")
        if not isinstance(self.environment, str):
            raise TypeError(f"environment is the name of a class, not {self.environment!r}")
        if not self.memory_bytes and not (self.cpu or self.gpu):
            raise ValueError("a worker needs some CPU, accelerator or memory to be placed by")

    @property
    def memory_bytes(self) -> int:
        """`mem` in bytes; 0 for none."""
        return size_bytes("mem", self.mem) if isinstance(self.mem, str) else int(self.mem * _GIB)


@dataclass(frozen=True, slots=True)
class SchedulingStrategy:
    """Where the workers of a role are.

    Attributes:
        type: "shared": one worker group for the role, placed together. "separate": a group and a placement of
            its own for each worker. "deferred": each worker has as many bundles, perhaps on several nodes, as
            it has accelerators (or whole CPUs, without any) and takes nothing of them: they are for what its
            engines start. "separation": as shared, and on none of the devices of another role. "colocation":
            on the devices of another role.
        target: That role.
        fork: Of a colocated role, whether its workers are processes of their own. If not, the role is a
            second name for the target's workers.

    Raises:
        ValueError: There is no such type, or it needs a target, or has none.
    """

    type: StrategyType = "shared"
    target: str = ""
    fork: bool = False

    def __post_init__(self) -> None:
        if self.type not in get_args(StrategyType):
            raise ValueError(f"strategy {self.type!r} is none of {', '.join(get_args(StrategyType))}")
        if self.type == "colocation" and not self.target:
            raise ValueError("colocation needs the role that it shares devices with, its target")
        if self.target and self.type not in ("separation", "colocation"):
            raise ValueError(f"strategy {self.type!r} has no target, and {self.target!r} was given")
        if self.fork and self.type != "colocation":
            raise ValueError(f"fork is for colocation, not for {self.type!r}")

    @property
    def shares_with(self) -> str:
        """The role whose devices it is on; empty for none."""
        return self.target if self.type == "colocation" else ""


@dataclass(frozen=True, slots=True)
class Job:
    """A role, and what its workers are to be.

    Attributes:
        role: Its name: letters, digits, ".", "_" and "-".
        replicas: Number of workers.
        tasks: One spec for all replicas, or one per replica. For a colocated role these reserve nothing, and
            must not ask for more than its target's workers have.
        scheduling_strategy: Where they are.

    Raises:
        TypeError: An attribute is of a wrong kind.
        ValueError: The name or a number can not be meant.

    Examples:
        >>> job = Job("rollout", 2, [SchedulingSpec(cpu=1, mem="512MB")])
        >>> job.worker_ids
        ('rollout/0', 'rollout/1')
    """

    role: str
    replicas: int
    tasks: Sequence[SchedulingSpec] = field(default_factory=lambda: (SchedulingSpec(),))
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not _ROLE.fullmatch(self.role):
            raise ValueError(f"role {self.role!r} is no name of letters, digits, '.', '_' and '-'")
        _check_count("replicas", self.replicas, 1)
        if not isinstance(self.tasks, Sequence):
            raise TypeError(f"tasks is a list of SchedulingSpec, not {self.tasks!r}")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        for task in self.tasks:
            if not isinstance(task, SchedulingSpec):
                raise TypeError(f"tasks has {task!r}, which is no SchedulingSpec")
        if len(self.tasks) not in (1, self.replicas):
            raise ValueError(f"{len(self.tasks)} tasks for {self.replicas} replicas; give one, or one each")
        if not isinstance(self.scheduling_strategy, SchedulingStrategy):
            raise TypeError(f"scheduling_strategy is a SchedulingStrategy, not {self.scheduling_strategy!r}")
        if self.scheduling_strategy.target == self.role:
            raise ValueError(f"role {self.role!r} can't be its own target")

    @property
    def specs(self) -> tuple[SchedulingSpec, ...]:
        """One for each replica."""
        return tuple(self.tasks) * self.replicas if len(self.tasks) == 1 else tuple(self.tasks)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The ids of the workers: "role/number"."""
        return tuple(f"{self.role}/{number}" for number in range(self.replicas))


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a role.

    Attributes:
        id: "role/number".
        ip: Address of its node.
        worker_ports: Ports that it has leased since its start.
        engine_ports: Ports that were allocated for its engines since.
        named_ports: Those that have a name.
    """

    id: str
    ip: str
    worker_ports: tuple[int, ...] = ()
    engine_ports: tuple[int, ...] = ()
    named_ports: Mapping[str, int] = field(default_factory=dict)


def _check_amount(name: str, value: Any) -> None:
    kind: Any = Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is a number, not {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r} is not a finite number of at least 0")


def _check_count(name: str, value: Any, least: int) -> None:
    kind: Any = Integral
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name}={value!r} is less than {least}")


def _names(what: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{what} is a sequence of names, not {names!r}")
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"{what} are names that differ, not {list(names)!r}")
    return tuple(names)
