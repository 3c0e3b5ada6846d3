"""What runs in a worker of a role: it makes engines by import path, and calls them on the main thread."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from raycrew.cluster_core import PortLease, lease_ports, visible_devices
from raycrew.worker_groups._worker import as_portable, check_env_vars, import_class
from raycrew.worker_groups.scheduling._results import Begun, awaited
from raycrew.worker_groups.scheduling.errors import (
    EngineCallError,
    EngineCreationError,
    EngineImportError,
    PortAllocationError,
    SchedulerError,
    WorkerConfigurationError,
)

_ENDINGS = ("destroy", "close", "shutdown")

#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@runtime_checkable
class Broadcaster(Protocol):
    """An engine that can give the arguments of a call to its tensor- and context-parallel peers."""

    def broadcast_arguments(self, arguments: Arguments | None) -> Arguments:
        """A collective operation of all peers: what the head gives, all get; the others give None."""
        ...


class RayRPCServer:
    """The worker of a role: a host of engines, each under a name of its own.

    A plain worker class, which a `RayWorkerGroup` starts; `RayScheduler` does so and calls it. Engines run on
    the main thread of its process, one call after the other, so that CUDA, signals and event loops are where
    they expect to be. Whether it lives is asked of its node (`RayScheduler.ping`), not of itself.

    Args:
        engine_paths: Patterns of the classes and functions that may be imported, as in "my.engines.*".
        port_range: First and last port that `alloc_ports` leases.

    Examples:
        >>> server = RayRPCServer(engine_paths=["collections.*"])
        >>> server.create_engine("collections.Counter", "letters", "abca")
        >>> server.call(["letters", "most_common", None, "1"], 1)
        [('a', 2)]
    """

    def __init__(
        self, engine_paths: Sequence[str] = ("*",), port_range: tuple[int, int] | None = None
    ) -> None:
        self._engine_paths, self._port_range = tuple(engine_paths), port_range
        self._engines: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._leases: list[tuple[str, PortLease]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = Begun()

    def ping(self) -> list[str]:
        """The names of the engines, once this worker has time to answer."""
        return list(self._engines)

    def alloc_ports(self, count: int, owner: str = "") -> tuple[int, ...]:
        """Lease ports until this process ends or its role does, also those that nobody hears of.

        Args:
            count: How many.
            owner: The role; see `release_ports`.

        Raises:
            PortAllocationError: There are not so many.
        """
        try:
            lease = lease_ports(count, port_range=self._port_range)
        except Exception as error:
            raise PortAllocationError(f"{count} ports can't be leased: {error}", cause=error) from error
        self._leases.append((owner, lease))
        return lease.ports

    def release_ports(self, owner: str) -> None:
        """Give the ports back that were leased for a role, when its engines have ended."""
        for lease in [lease for whose, lease in self._leases if whose == owner]:
            lease.release()
        self._leases = [(whose, lease) for whose, lease in self._leases if whose != owner]

    def set_env(self, env_vars: Mapping[str, str]) -> None:
        """Set variables of this process; libraries that were imported before may not look again.

        Raises:
            WorkerConfigurationError: No environment can hold one.
        """
        try:
            os.environ.update(check_env_vars(env_vars, "env_vars"))
        except (TypeError, ValueError) as error:
            raise WorkerConfigurationError(str(error), cause=error) from error

    def configure(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function by import path, such as one that seeds random numbers; gives what it returns.

        Raises:
            EngineImportError: It can't be imported here, or is not allowed.
            WorkerConfigurationError: It has raised.
        """
        run = self._load(function)
        try:
            return awaited(run(*args, **kwargs), None, self._own_loop)
        except (Exception, SystemExit) as error:
            why = f"{function} raised {type(error).__name__}: {error}"
            raise WorkerConfigurationError(why, cause=as_portable(error)) from error

    def create_engine(self, path: str, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Make an engine.

        Args:
            path: Its class, or a function that makes one, such as "package.module.Class".
            name: What it is called from then on.
            *args: Positional arguments of the class.
            **kwargs: Its keyword arguments.

        Raises:
            EngineImportError: It can't be imported here, or is not allowed.
            EngineCreationError: It has raised or given None, or there is an engine of this name.
        """
        if name in self._engines:
            raise EngineCreationError(f"there is an engine {name!r} already; destroy it first")
        make = self._load(path)
        try:
            engine = awaited(make(*args, **kwargs), None, self._own_loop)
        except (Exception, SystemExit) as error:
            why = f"{path} raised {type(error).__name__}: {error}"
            raise EngineCreationError(why, cause=as_portable(error)) from error
        if engine is None:
            raise EngineCreationError(f"{path} gave None in place of an engine")
        self._engines[name] = engine

    def create_engine_of(self, owner: str, path: str, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Make an engine that belongs to a role; `destroy` can end those of one role. See `create_engine`."""
        self.create_engine(path, name, *args, **kwargs)
        self._owners[name] = owner

    def call(self, what: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an engine; where it gives a future or a coroutine, that is waited for.

        Args:
            what: The engine; its method; how long to wait for what that gives, if it is a future (None for no
                limit); and what tells this call from any other one. One list, for Ray sends each argument by
                itself.
            *args: Positional arguments of the method.
            **kwargs: Its keyword arguments.

        Raises:
            EngineCallError: There is no such engine or method; or the method ended its process by `sys.exit`,
                which it does not, or raised an error of a scheduler of its own.
            Exception: Whatever else the method raises.
        """
        name, method, timeout_s, number = what
        with self._begun.under_way(number):
            bound = self._bound(name, method)
            with _told_as_of_an_engine():
                return awaited(bound(*args, **kwargs), timeout_s, self._own_loop)

    def call_with_peers(
        self,
        name: str,
        method: str,
        timeout_s: float | None,
        is_head: bool,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a method of an engine with the arguments that the head of its peers was sent.

        Args:
            name: The engine, which is a `Broadcaster`.
            method: Its method.
            timeout_s: See `call`.
            is_head: Whether these are the arguments; other workers are sent none.
            *args: Positional arguments of the method.
            **kwargs: Its keyword arguments.

        Raises:
            EngineCallError: There is no such engine or method, or it is no `Broadcaster`; see `call`.
            Exception: Whatever else the engine raises.
        """
        bound, broadcast = self._bound(name, method), self._bound(name, "broadcast_arguments")
        with _told_as_of_an_engine():
            args, kwargs = broadcast((args, kwargs) if is_head else None)
            return awaited(bound(*args, **kwargs), timeout_s, self._own_loop)

    def _bound(self, name: str, method: str) -> Callable[..., Any]:
        if name not in self._engines:
            raise EngineCallError(f"there is no engine {name!r} on this worker; it has {self.ping()}")
        bound = getattr(self._engines[name], method, None)
        if not callable(bound):
            kind = type(self._engines[name]).__qualname__
            raise EngineCallError(f"engine {name!r} has no method {method!r}: it is a {kind}")
        return bound  # type: ignore[no-any-return]

    def has_begun(self, number: str) -> bool:
        """Whether a call of this number has begun, or may have, so long ago that it was forgotten."""
        return number in self._begun

    def end_role(self, owner: str) -> None:
        """End the engines of a role that goes while this process stays, and give its ports back.

        Raises:
            ExceptionGroup: See `destroy`.
        """
        try:
            self.destroy(None, owner)
        finally:
            self.release_ports(owner)

    def destroy(self, names: Sequence[str] | None = None, owner: str | None = None) -> list[str]:
        """End engines, the newest first, by their `destroy`, `close` or `shutdown`; forget them in any case.

        Args:
            names: Which; those that are not there are skipped. None for all.
            owner: The role of which they are; None for any.

        Returns:
            The names of those that there were.

        Raises:
            ExceptionGroup: What some of them raised; the others have ended all the same.
        """
        found = [
            name
            for name in reversed(self._engines)
            if (names is None or name in names) and owner in (None, self._owners.get(name))
        ]
        errors = [error for name in found if (error := self._end(name)) is not None]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(found)} engines did not end well", errors)
        return found

    def visible_devices(self) -> dict[str, str]:
        """The variables that say which devices this process sees."""
        return visible_devices(os.environ)

    def _end(self, name: str) -> Exception | None:
        engine, _ = self._engines.pop(name), self._owners.pop(name, None)
        try:
            with _told_as_of_an_engine():
                bounds = (getattr(engine, way, None) for way in _ENDINGS)
                end: Callable[[], Any] | None = next(filter(callable, bounds), None)
                if end is not None:
                    awaited(end(), None, self._own_loop)
        except Exception as error:  # noqa: BLE001 - told with those of the others
            as_portable(error)
            return error
        return None

    def _load(self, path: str) -> Callable[..., Any]:
        check_path(path, self._engine_paths)
        try:
            found = import_class(path)
        except (Exception, SystemExit) as error:
            hint = "is its module on PYTHONPATH on the worker's node, or in its environment?"
            why = f"{path} can't be imported on the worker: {type(error).__name__}: {error} ({hint})"
            raise EngineImportError(why, cause=as_portable(error)) from error
        if not callable(found):
            raise EngineImportError(f"{path} is neither a class nor a function: {found!r}")
        check_home(path, found, self._engine_paths)
        return found  # type: ignore[no-any-return]

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop


@contextmanager
def _told_as_of_an_engine() -> Iterator[None]:
    """Within, an engine runs: it ends no worker, and its own schedulers' errors are not those of this one."""
    try:
        yield
    except (SystemExit, SchedulerError) as error:
        why = f"it raised {type(error).__name__}: {error}"
        raise EngineCallError(why, cause=as_portable(error)) from error


def check_path(path: str, allowed: Sequence[str]) -> None:
    """Check the import path of an engine.

    Raises:
        EngineImportError: It is no path like "package.module.Class", or fits no pattern of `allowed`.
    """
    parts = path.replace(":", ".").split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(parts):
        raise EngineImportError(f"{path!r} is no import path like 'package.module.Class'")
    if not any(fnmatchcase(".".join(parts), pattern) for pattern in allowed):
        raise EngineImportError(f"{path!r} is not among the engines that are allowed: {list(allowed)}")


def check_home(path: str, found: Any, allowed: Sequence[str]) -> None:
    """Check where an engine is defined, for a module has whatever it imports as attributes, too.

    Raises:
        EngineImportError: Nobody allowed what is defined there, nor this very path.
    """
    named = found if isinstance(getattr(found, "__module__", None), str) else type(found)
    home = f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"
    if path.replace(":", ".") not in allowed and not any(fnmatchcase(home, pattern) for pattern in allowed):
        raise EngineImportError(
            f"{path} is defined as {home}, which is not among the engines that are allowed: {list(allowed)}; "
            "allow that, or this very path"
        )
