"""Actors: made and found, asked whether they live, and ended."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError

from raycrew.cluster_core import Session
from raycrew.worker_groups._ray.gate import ANSWER_S, ask
from raycrew.worker_groups._ray.raised import DEATHS, may_come_back
from raycrew.worker_groups._ray.sessions import current_session

logger = logging.getLogger(__name__)

ActorState = Literal["ready", "busy", "dead"]


def start_actor(
    remote_class: Any,
    options: Mapping[str, Any],
    timeout_s: float = ANSWER_S,
    arguments: Sequence[Any] = (),
) -> ActorHandle[Any]:
    """Ask Ray for an actor; does not wait until it runs.

    Raises:
        GetTimeoutError: Ray's control service does not answer; should it make the actor later, that is ended.
    """
    return ask(
        lambda: remote_class.options(**options).remote(*arguments),
        timeout_s=timeout_s,
        undo=lambda handle: ray.kill(handle, no_restart=True),
    )


def find_actor(name: str, namespace: str) -> Any:
    """The handle of a named actor; None where there is none.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    try:
        return ask(lambda: ray.get_actor(name, namespace))
    except ValueError:
        return None


def actor_states(handles: Sequence[ActorHandle[Any]], timeout_s: float) -> dict[int, ActorState]:
    """Whether each actor answers, keeps its caller waiting, or is gone, by position."""
    session = current_session()
    with session.while_connected():
        refs: list[Any] = [handle.__ray_ready__.remote() for handle in handles]
    done, _ = session.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answered = set(done)
    return {i: _state(session, ref) if ref in answered else "busy" for i, ref in enumerate(refs)}


def _state(session: Session, ref: Any) -> ActorState:
    try:
        session.get(ref)
    except DEATHS as error:
        return "busy" if may_come_back(error) else "dead"
    return "ready"


def request_exit(handles: Sequence[ActorHandle[Any]]) -> None:
    """Ask actors to end after what they are doing, with their exit handlers."""
    with current_session().while_connected():
        for handle in handles:
            handle.__ray_terminate__.remote()


def end_actors(handles: Sequence[ActorHandle[Any]]) -> None:
    """Kill actors for good, whatever state they are in."""
    try:
        ask(lambda: [ray.kill(handle, no_restart=True) for handle in handles])
    except GetTimeoutError as error:
        logger.warning("%d actors are killed once Ray can: %s", len(handles), error)


def await_end(handles: Sequence[ActorHandle[Any]], timeout_s: float) -> list[int]:
    """Wait until actors have ended; returns the positions of those that had not by then."""
    deadline, session = time.monotonic() + timeout_s, current_session()
    living = dict(enumerate(handles))
    while living:
        with session.while_connected():
            refs: dict[Any, int] = {
                handle.__ray_ready__.remote(): position for position, handle in living.items()
            }
        for ref, position in refs.items():
            try:
                session.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                return sorted(living)
            except DEATHS as error:
                if not may_come_back(error):
                    del living[position]
    return []
