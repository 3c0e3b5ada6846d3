"""Engines on the workers of roles: made, called and ended."""

from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._calls import deadline_after
from raycrew.worker_groups._health import checked_time
from raycrew.worker_groups.scheduling._roles import Roles, Seat
from raycrew.worker_groups.scheduling._sending import (
    call_engine,
    call_engine_async,
    gathered,
    send,
    told_as,
)
from raycrew.worker_groups.scheduling._server import check_path
from raycrew.worker_groups.scheduling.errors import (
    EngineCallError,
    EngineCreationError,
    SchedulerError,
    WorkerConfigurationError,
)


class EngineCalls:
    """What a scheduler does with engines; see the methods."""

    _roles: Roles
    _engine_paths: tuple[str, ...]
    _call_timeout_s: float

    def create_engine(
        self,
        worker_id: str,
        engine: str,
        engine_name: str | None = None,
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Make an engine on a worker, which may have several.

        Args:
            worker_id: The worker.
            engine: Import path of its class, or of a function that makes it: "package.module.Class".
            engine_name: What it is called on that worker; the worker's id by default.
            *args: Positional arguments of the class.
            timeout_s: Deadline; by default the scheduler's `call_timeout_s`. An argument of the class that is
                named as one of these goes by position.
            **kwargs: Keyword arguments of the class.

        Raises:
            EngineImportError: It can't be imported there, or is not allowed; then nothing was sent.
            EngineCreationError: It has raised or given None, or there is one of this name, or an argument
                can't be sent.
            WorkerFailedError: The worker has died.
            WorkerTimeoutError: It was late; it goes on.
            TypeError: A name or a time is none; so for every method here.
            ValueError: A time is not finite, or below zero.
        """
        seat, asked = self._asked_to_make(worker_id, engine, engine_name)
        time_s = self._time(timeout_s)
        with told_as(worker_id, "create_engine", EngineCreationError):
            send(seat, "create_engine_of", time_s, (*asked, *args), kwargs).get_results()

    async def async_create_engine(
        self,
        worker_id: str,
        engine: str,
        engine_name: str | None = None,
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        """`create_engine` without blocking the event loop: with `asyncio.gather`, on many workers at once."""
        seat, asked = self._asked_to_make(worker_id, engine, engine_name)
        time_s = self._time(timeout_s)
        with told_as(worker_id, "create_engine", EngineCreationError):
            await send(seat, "create_engine_of", time_s, (*asked, *args), kwargs)

    def _asked_to_make(
        self, worker_id: str, engine: str, engine_name: str | None
    ) -> tuple[Seat, tuple[str, str, str]]:
        """Whom to ask for an engine, and the role that it belongs to, its path and its name."""
        check_path(engine, self._engine_paths)
        role, seat = self._roles.seat(worker_id)
        name = name_of(engine_name, worker_id)
        role.hosts.add(worker_id)
        return seat, (role.name, engine, name)

    def call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method of an engine and wait for what it gives.

        The call is sent again only if the connection to the worker broke and it surely never began.

        Args:
            worker_id: The worker.
            method: The method.
            engine_name: Which of its engines; by default the one of the worker's id.
            *args: Positional arguments of the method.
            timeout_s: Deadline; by default the scheduler's `call_timeout_s`. It is this call's alone: an
                argument of the method that is named so, or as another one of these, goes by position.
            **kwargs: Keyword arguments of the method.

        Raises:
            EngineCallError: It has raised (`cause` is what), or there is no such engine or method, or an
                argument can't be sent.
            WorkerFailedError: The worker has died, with the last lines of its output.
            WorkerTimeoutError: It has not returned in time; it goes on.
            WorkerNotFoundError: There is no such worker.
        """
        _, seat = self._roles.seat(worker_id)
        name, time_s = name_of(engine_name, worker_id), self._time(timeout_s)
        with told_as(worker_id, method, EngineCallError):
            return call_engine(seat, name, method, time_s, args, kwargs)

    async def async_call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """`call_engine` without blocking the event loop."""
        _, seat = self._roles.seat(worker_id)
        name, time_s = name_of(engine_name, worker_id), self._time(timeout_s)
        with told_as(worker_id, method, EngineCallError):
            return await call_engine_async(seat, name, method, time_s, args, kwargs)

    def call_peers(
        self,
        worker_ids: Sequence[str],
        method: str,
        engine_name: str | None = None,
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method on a data-parallel head and its tensor- and context-parallel peers, all at once.

        Only the head is sent the arguments; its engine, a `Broadcaster`, gives them to the others.

        Args:
            worker_ids: The head, and the others.
            method: The method.
            engine_name: Which of their engines; by default, of each worker, the one of its id.
            *args: Positional arguments of the method.
            timeout_s: Deadline; by default the scheduler's `call_timeout_s`.
            **kwargs: Keyword arguments of the method.

        Returns:
            What each of them gives, in their order.

        Raises:
            WorkerConfigurationError: Two are in one process, where one would wait for the other for ever.
            SchedulerError: One of them failed, as soon as it did, or was late; see `call_engine`.
        """
        seats = {worker_id: self._roles.seat(worker_id)[1] for worker_id in worker_ids}
        if len({(seat.group, seat.rank) for seat in seats.values()}) < len(worker_ids):
            why = f"peers have a process each, and of {list(worker_ids)} two share one"
            raise WorkerConfigurationError(why)
        time_s, calls = self._time(timeout_s), {}
        for position, (worker_id, seat) in enumerate(seats.items()):
            asked = (name_of(engine_name, worker_id), method, time_s, not position)
            given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}) if position else (args, kwargs)
            with told_as(worker_id, method, EngineCallError):
                calls[worker_id] = send(seat, "call_with_peers", time_s, (*asked, *given[0]), given[1])
        results = gathered(calls, method, deadline_after(time_s))
        return [results[worker_id] for worker_id in worker_ids]

    def destroy_engine(
        self, worker_id: str, engine_name: str | None = None, timeout_s: float | None = None
    ) -> bool:
        """End an engine by its `destroy`, `close` or `shutdown`; tells whether there was one.

        Raises:
            EngineCallError: That has raised; the engine is gone all the same.
            SchedulerError: The worker could not be asked.
        """
        _, seat = self._roles.seat(worker_id)
        asked = ([name_of(engine_name, worker_id)],)
        return bool(self._ask(seat, worker_id, "destroy", EngineCallError, timeout_s, asked, {}))

    def _ask(
        self,
        seat: Seat,
        worker_id: str,
        method: str,
        kind: type[SchedulerError],
        timeout_s: float | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        time_s = self._time(timeout_s)
        with told_as(worker_id, method, kind):
            return send(seat, method, time_s, args, kwargs).get_results()[0]

    def _time(self, timeout_s: float | None) -> float:
        return self._call_timeout_s if timeout_s is None else checked_time("timeout_s", timeout_s)


def name_of(engine_name: str | None, worker_id: str) -> str:
    """What an engine is called on its worker.

    Raises:
        TypeError: It is no text; whoever gave it may have meant the first argument of the engine.
    """
    if engine_name is not None and not isinstance(engine_name, str):
        raise TypeError(
            f"engine_name is a text, or None for the engine of the worker's id, not {engine_name!r}; "
            "arguments of the engine come after it"
        )
    return engine_name or worker_id
