"""`sync_weights`, and the same to be awaited."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from raycrew.tensor_transport.protocols import PeerGroup
from raycrew.tensor_transport.weights._directory import WeightDirectory
from raycrew.tensor_transport.weights._syncing.report import WeightSyncReport
from raycrew.tensor_transport.weights._syncing.routing import WeightRoute
from raycrew.tensor_transport.weights._syncing.session import Progress
from raycrew.tensor_transport.weights._syncing.synchronisation import Generators, Synchronisation

P = ParamSpec("P")
T = TypeVar("T")


def _called_like(other: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of another one."""

    def dressed(function: Callable[..., T]) -> Callable[P, T]:
        result = function.__annotations__["return"]
        signature = inspect.signature(other).replace(return_annotation=result)
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__annotations__ = other.__annotations__ | {"return": result}
        return function

    return dressed


def sync_weights(
    trainer: PeerGroup,
    generators: Generators,
    *,
    publish: str = "publish_weights",
    apply: str = "apply_weights",
    pause: str | None = None,
    resume: str | None = None,
    timeout_s: float | None = 600.0,
    directory: WeightDirectory | None = None,
    prepare: str | None = None,
    recipients: Sequence[int] | None = None,
    progress: Progress | None = None,
    route: WeightRoute | None = None,
) -> WeightSyncReport:
    """Bring the generators to the trainer's weights; only a small `WeightUpdate` passes through the driver.

    With a `directory`, which the publishers and receivers have, too, generators fetch what the trainer has
    put while it puts the rest, and are paused only to load it. The version counts when all of them have
    loaded it; if one fails, all return to what they had (see `WeightReceiver`'s `rollback`).

    Args:
        trainer: Its ranks have a method `publish` that returns the `WeightUpdate` on one rank, else None; or
            each rank returns its part. It is called on all ranks, whatever it is declared as.
        generators: Their ranks have a method `apply` that takes the update and returns the `WeightReceipt`.
            Several groups are updated as one.
        publish: Name of the trainer's method.
        apply: Name of the generators' method; with a directory it is given the version's number, to be
            handed on as it is.
        pause: Method called on the generators before the update is applied; updates of this process that
            pause the same groups (the very objects) do so one after another.
        resume: Method called on the generators afterwards, also when a pause or the update failed: on each
            rank but those whose weights are, or may be, a mixture. These stay paused until an update reaches
            them, also where the next one fails before: this process remembers them for as long as there is
            the group (the very object). It has to bear being called on a rank whose pause failed.
        timeout_s: Deadline of each of the steps; with a directory, of everything up to its decision. So long
            generators may stay paused where a process hangs while it looks back, or loads.
        directory: Where the trainer announces its versions.
        prepare: With a directory: name of the generators' method that takes the version's number and calls
            `WeightReceiver.prepare`, before the pause. Without it they fetch while they are paused. Where it
            returns the receipt of that, and all of them can return at once to what they hold, they are paused
            as soon as all have it, and else once `publish` has returned.
        recipients: The generators to update, numbered through all groups; all unless given.
        progress: Called with a `SyncProgress` whenever a rank has done a step, maybe in another thread. What
            it raises, this does, once all ranks have ended the step and were resumed; a version in a
            directory is given up, unless it is decided. The same holds for an interrupt from the keyboard.
        route: With a directory: how the bytes go, chosen for all ranks at once; their publishers and
            receivers have a `RouteStore`. To join it they have as long again. Updates over one route take
            turns, for which each waits as long, too.

    Raises:
        ValueError: There are no such recipients, `timeout_s` is not above 0, or `prepare` or `route` has no
            directory.
        TransportTimeoutError: Another update over the route did not end in time.
        TransportError: An update began within another one over the same route: by its `progress`, say.
        NoTransportError: There is no route that all ranks can use.
        WeightUpdateError: No rank, or not the right ranks published, or the generators report different
            versions.
        Exception: What the group raises for the first rank that failed; its notes name the other ranks, and
            those that were not resumed. Generators that failed still report their previous version. Without a
            directory the update stays published, and calling this again brings all of them to one version.
    """
    return Synchronisation(
        trainer,
        generators,
        publish,
        apply,
        pause,
        resume,
        timeout_s,
        directory,
        prepare,
        recipients,
        progress,
        route,
    ).run()


@_called_like(sync_weights)
def sync_weights_async(*args: Any, **options: Any) -> Coroutine[Any, Any, WeightSyncReport]:
    """`sync_weights` without blocking the event loop, once what it returns is awaited.

    If it is cancelled, a version in a directory is given up, and the generators are resumed in the
    background, before another update pauses them; without a directory the update goes on there.

    Its arguments and errors are those of `sync_weights`; bad arguments are refused at once, before anything
    is awaited. `progress` is called in another thread.
    """
    asked = inspect.signature(sync_weights).bind(*args, **options)
    asked.apply_defaults()
    return _awaited(Synchronisation(**asked.arguments))


async def _awaited(running: "Synchronisation") -> WeightSyncReport:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[WeightSyncReport] = loop.create_future()
    thread = threading.Thread(target=_run_for, args=(running, loop, done), name="weight-sync", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        await asyncio.to_thread(running.give_up, "the synchronisation was cancelled")
        raise


def _run_for(
    running: "Synchronisation", loop: asyncio.AbstractEventLoop, done: "asyncio.Future[WeightSyncReport]"
) -> None:
    def settle(report: WeightSyncReport | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if report is not None:
            done.set_result(report)
        elif error is not None:
            done.set_exception(error)

    try:
        outcome: tuple[WeightSyncReport | None, BaseException | None] = (running.run(), None)
    except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
        outcome = (None, error)
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle, *outcome)
