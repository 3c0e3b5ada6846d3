"""What a worker class is: found by name or by value, described without keeping it."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ray import cloudpickle

from raycrew.worker_groups._ray import unwrap_actor_class
from raycrew.worker_groups._worker.declared import Declaration, find_declaration
from raycrew.worker_groups._worker.options import Configured, read_configured

Kind = Literal["sync", "async", "generator", "async_generator"]

#: A class as it travels: its fully qualified name, or a pickle of itself.
ClassSource = str | bytes

#: A parameter that `@ray.remote` gives each method of a class.
_ADDED_BY_RAY = "_ray_trace_ctx"

_METHOD_OPTIONS = (
    "__ray_num_returns__",
    "__ray_concurrency_group__",
    "__ray_generator_backpressure_num_objects__",
    "__ray_enable_task_events__",
)


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One method of a worker class.

    Attributes:
        name: Its name.
        kind: How its result comes.
        signature: Parameters without `self`; annotations and default values are left out, because they may
            need modules that only the worker's environment has.
        options: What `ray.method` set on it.
        declared: How a group calls it, where it, or what it overrides, says so.
        origin: Fully qualified name of the function.
    """

    name: str
    kind: Kind
    signature: inspect.Signature
    options: Mapping[str, Any] = field(default_factory=dict)
    declared: Declaration | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class ClassInfo:
    """What the driver needs to know of a worker class.

    Attributes:
        fqn: Fully qualified name.
        methods: Its methods by name, without special ones.
        init: Parameters of `__init__` without `self`.
        options: Ray options that the class brings along.
        is_async: Whether Ray runs it on an event loop.
        configured: What its `configure_worker` answered for each worker; empty answers where it has none.
    """

    fqn: str
    methods: Mapping[str, MethodInfo]
    init: inspect.Signature
    options: Mapping[str, Any]
    is_async: bool
    configured: tuple[Configured, ...] = ()

    @property
    def name(self) -> str:
        """The class's own name."""
        return self.fqn.rpartition(".")[2]


def import_class(fqn: str) -> Any:
    """Import `package.module.Class`; the class may be nested.

    Raises:
        ImportError: No module of that name, or no such attribute in it.
    """
    parts = fqn.replace(":", ".").split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that fails on one of its own imports is not "no such module".
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError as error:
            raise ImportError(f"module {module_name!r} has no {'.'.join(parts[cut:])!r}") from error
        return found
    raise ImportError(f"no module for {fqn!r}; a worker class is named like 'package.module.Class'")


def load_class(source: ClassSource) -> tuple[type, dict[str, Any]]:
    """The class of a source, and the options it was decorated with.

    Raises:
        ImportError: It can't be imported here.
        TypeError: What was found is not a class.
    """
    found = import_class(source) if isinstance(source, str) else cloudpickle.loads(source)
    cls, options = unwrap_actor_class(found)
    if not isinstance(cls, type):
        raise TypeError(f"{source if isinstance(source, str) else found!r} is not a class")
    return cls, options


def held_class(worker: Any) -> Any:
    """The object that `worker` stands for, if this process holds it already; else None."""
    if not isinstance(worker, str):
        return worker
    module, _, name = worker.replace(":", ".").rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def source_of(worker: Any) -> ClassSource:
    """How a worker class travels: by name where it was named or is a decorated class of a module."""
    if isinstance(worker, str):
        return worker
    cls, _ = unwrap_actor_class(worker)
    fqn = fqn_of(worker)
    if cls is not worker and cls.__module__ != "__main__" and held_class(fqn) is worker:
        return fqn
    return bytes(cloudpickle.dumps(cls))  # type: ignore[no-untyped-call]


def fqn_of(worker: Any) -> str:
    """Fully qualified name of a worker class.

    Raises:
        TypeError: It is neither a class nor a name of one.
    """
    if isinstance(worker, str):
        if "." not in worker.replace(":", ".").strip("."):
            raise TypeError(f"{worker!r} is not a fully qualified name like 'package.module.Class'")
        return worker.replace(":", ".")
    cls, _ = unwrap_actor_class(worker)
    if not isinstance(cls, type):
        raise TypeError(f"a worker is a class, a @ray.remote class or a name of one, not {worker!r}")
    return f"{cls.__module__}.{cls.__qualname__}"


def fqn_of_function(fn: Callable[..., Any]) -> str:
    """Fully qualified name of a function."""
    return f"{fn.__module__}.{fn.__qualname__}"


def describe(source: ClassSource, requests: Sequence[Mapping[str, Any]] = ()) -> ClassInfo:
    """Describe a class in a process that can import it.

    Args:
        source: The class.
        requests: Per worker, what `configure_worker` is asked: num_gpus, bundle_indices, num_gpus_per_node.
    """
    return describe_class(*load_class(source), requests)


def describe_class(
    cls: type, decorated: Mapping[str, Any], requests: Sequence[Mapping[str, Any]] = ()
) -> ClassInfo:
    """Describe a class that this process holds.

    Raises:
        TypeError: A method does not fit what is said on it of its calls.
    """
    methods = {name: _describe_method(cls, name, fn) for name, fn in _functions(cls)}
    own = getattr(cls, "_default_options", None)
    options = {**(own if isinstance(own, Mapping) else {}), **decorated}
    return ClassInfo(
        fqn=f"{cls.__module__}.{cls.__qualname__}",
        methods=methods,
        init=_bare(inspect.signature(_init(cls)), skip=1)
        if inspect.isfunction(_init(cls))
        else inspect.Signature(),
        options=options,
        is_async=any(m.kind.startswith("async") for m in methods.values()),
        configured=tuple(_configure(cls, request) for request in requests),
    )


def _init(cls: type) -> Any:
    return cls.__init__  # type: ignore[misc]


def _functions(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    found = inspect.getmembers(cls, lambda m: inspect.isfunction(m) or inspect.ismethod(m))
    return [(n, fn) for n, fn in found if n == "__call__" or not (n.startswith("__") and n.endswith("__"))]


def _describe_method(cls: type, name: str, fn: Callable[..., Any]) -> MethodInfo:
    bound = isinstance(inspect.getattr_static(cls, name), staticmethod) or inspect.ismethod(fn)
    options = {key: getattr(fn, key) for key in _METHOD_OPTIONS if hasattr(fn, key)}
    signature = _bare(inspect.signature(fn), skip=0 if bound else 1)
    declared = find_declaration(cls, name, signature)
    return MethodInfo(name, _kind(fn), signature, options, declared, fqn_of_function(fn))


def _kind(fn: Callable[..., Any]) -> Kind:
    if inspect.isasyncgenfunction(fn):
        return "async_generator"
    if inspect.isgeneratorfunction(fn):
        return "generator"
    return "async" if inspect.iscoroutinefunction(fn) else "sync"


def _bare(signature: inspect.Signature, skip: int) -> inspect.Signature:
    parameters = [p for p in signature.parameters.values() if p.name != _ADDED_BY_RAY][skip:]
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [p.replace(annotation=empty, default=empty if p.default is empty else None) for p in parameters]
    )


def _configure(cls: type, request: Mapping[str, Any]) -> Configured:
    configure = getattr(cls, "configure_worker", None)
    if configure is None:
        return Configured()
    accepted = inspect.signature(configure).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    known = {k: v for k, v in request.items() if takes_all or k in accepted}
    return read_configured(configure(**known), cls.__qualname__)
