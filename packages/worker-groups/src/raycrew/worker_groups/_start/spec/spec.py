"""What a group is to be: its worker with arguments and options, its layout, its wishes."""

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Self

from raycrew.cluster_core import Cluster
from raycrew.worker_groups._start.spec.options import GroupOptions
from raycrew.worker_groups._worker import GROUP_OPTIONS, HOOK, ClassInfo, fqn_of
from raycrew.worker_groups.errors import UnknownMethodError
from raycrew.worker_groups.protocols import ArgumentTransport
from raycrew.worker_groups.sharding import SeatPlan

#: How near a name that does not fit is to the one that was meant; and one that `**kwargs` would take.
_NEAR, _VERY_NEAR = 0.75, 0.85


class RayWorkerBuilder:
    """A worker class with the arguments of its `__init__`.

    Args:
        worker: A class, a `@ray.remote` class, or a fully qualified name such as "package.module.Class". A
            name is imported in the worker's environment only, never here.
        *args: Positional arguments of `__init__`. As in a call, an ObjectRef or the future of another group's
            call goes from worker to worker: `__init__` gets the value, or the list of them.
        **kwargs: Keyword arguments of `__init__`. Here, as in a group's `init=`, they may have any name, also
            that of an option of the group.

    Raises:
        TypeError: `worker` is none of these.

    Examples:
        >>> class Echo:
        ...     def __init__(self, word: str, times: int = 1) -> None:
        ...         self.said = " ".join([word] * times)
        ...
        ...     def say(self) -> str:
        ...         return self.said
        >>> with RayWorkerGroup(cluster, RayWorkerBuilder(Echo, "hey", times=2)) as group:
        ...     group.call(Echo.say).get_results()
        ['hey hey', 'hey hey']
    """

    def __init__(self, worker: Any, /, *args: Any, **kwargs: Any) -> None:
        self.fqn = fqn_of(worker)
        self.worker = worker
        self.args = args
        self.kwargs = kwargs
        self.ray_options: Mapping[str, Any] = {}

    def options(self, **ray_options: Any) -> Self:
        """This builder with Ray actor options; they override the class's own, not `configure_worker`'s.

        Raises:
            ValueError: One says where a worker is or how long it lives, which is for its group to say.
        """
        if taken := [name for name in sorted(GROUP_OPTIONS) if ray_options.get(name) is not None]:
            raise ValueError(
                f"{taken[0]}={ray_options[taken[0]]!r} would have no effect: where workers are and how long "
                "they live is for their group to say, by its cluster, name_prefix=, max_restarts= and so on"
            )
        other = type(self)(self.worker, *self.args, **self.kwargs)
        other.ray_options = {**self.ray_options, **ray_options}
        return other

    def __repr__(self) -> str:
        return f"RayWorkerBuilder({self.fqn})"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """All that a start-up needs to know.

    Attributes:
        name: Name of the group.
        builder: The workers' class and its arguments.
        cluster: Where they are to be.
        plan: Who sits where.
        options: What the caller wishes.
        init_kwargs: Keyword arguments of `__init__` that were given beside the options.
        forwarded: Variables of the driver that the policy forwards, as they were when the group was made.
        secrets: Values of the secrets that the options name.
        transport: The one that the options ask for.

    Raises:
        TypeError: The name is no string.
    """

    name: str
    builder: RayWorkerBuilder
    cluster: Cluster
    plan: SeatPlan
    options: GroupOptions
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    forwarded: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    transport: ArgumentTransport | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name_prefix is a string, not {self.name!r}")


def check_init(
    info: ClassInfo,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loose: Collection[str] = (),
    whole: bool = True,
) -> None:
    """Check arguments against a worker class's `__init__`.

    Args:
        info: The worker class.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        loose: Names that were given beside the group's options. One that only `**kwargs` of `__init__` takes
            and that is nearly an option's is taken for a misspelt option.
        whole: Whether these are all the arguments.

    Raises:
        TypeError: They don't fit.
    """
    bind = info.init.bind if whole else info.init.bind_partial
    try:
        bind(*args, **kwargs)
    except TypeError as error:
        advice = _near_misses(info, kwargs, _NEAR)
        raise TypeError(f"{advice}{info.name}.__init__{info.init}: {error}") from None
    named = {p.name for p in info.init.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if advice := _near_misses(info, [name for name in loose if name not in named], _VERY_NEAR):
        raise TypeError(
            f"{advice}{info.name}.__init__{info.init} names no such parameter. "
            "An argument that has such a name all the same goes into init=dict(…)"
        )


def _near_misses(info: ClassInfo, names: Iterable[str], nearness: float) -> str:
    """Which options of a group, or parameters of a class, misspelt ones may have been meant as."""
    own = list(info.init.parameters)
    options = [
        "workers_per_node",
        "name_prefix",
        "bundle_indices_list",
        *(f.name for f in fields(GroupOptions)),
    ]
    near = {name: get_close_matches(name, own + options, 1, nearness) for name in names if name not in own}
    meant = {name: found[0] for name, found in near.items() if found}
    return "".join(
        f"did you mean {found!r}{'' if found in own else ', an option of the group'}, by {name!r}? "
        for name, found in meant.items()
    )


def check_methods(info: ClassInfo, idempotent: Iterable[str]) -> None:
    """Check that a worker class has the methods that may run twice, and what it does in a new generation.

    Args:
        info: The class.
        idempotent: Names of methods that are said to be idempotent.

    Raises:
        TypeError: What it does in a new generation is a generator, or takes anything else than a worker.
        UnknownMethodError: It has no method of a name.
    """
    if unknown := [name for name in idempotent if name not in info.methods]:
        near = get_close_matches(unknown[0], info.methods, 1, _NEAR)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownMethodError(f"idempotent_methods: {info.fqn} has no method {unknown[0]!r}{meant}")
    hook = info.methods.get(HOOK)
    if hook is None:
        return
    wanted = f"{info.name}.{HOOK} is called with the current worker at every new generation"
    if "generator" in hook.kind:
        raise TypeError(f"{wanted}; it can't be {hook.kind}")
    try:
        hook.signature.bind(None)
    except TypeError as error:
        raise TypeError(f"{wanted}; with {hook.signature} that fails: {error}") from None


def worker_aliases(group_name: str, plan: SeatPlan) -> list[str]:
    """The readable name of each position: `prefix-grpG-R` in a tied group, else `prefix-NODE-BUNDLE`."""
    sizes = Counter(seat.tied_group for seat in plan.seats)
    return [
        f"{group_name}-grp{seat.tied_group}-{seat.place_in_group}"
        if sizes[seat.tied_group] > 1
        else f"{group_name}-{seat.home}-{seat.number_on_node}"
        for seat in plan.seats
    ]
