"""The watches of this driver's session: one on each node that it has workers on, asked with deadlines."""

import functools
import inspect
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups._on_nodes import (
    examining,
    family,
    keeper,
    leavings,
    limits,
    lookout,
    marks,
    page,
    process_table,
    ring,
    sight,
    stacks,
    watch,
)
from raycrew.worker_groups._ray import (
    connection,
    current_session,
    end_actors,
    is_alive_node,
    may_come_back,
    start_actor,
)
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import WorkerFacts

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # for a watch to be made anew and to answer, besides what it is asked to wait
_LOOK_S = 1.0  # for a look at what nodes there are, when all that is over
_TRIES = 3
_KEEPERS = (process_table, marks, family, lookout, keeper)  # each needs only those before it
_FAILURES = (RayError, ClusterClosedError, WorkerGroupError)

#: How the names of watches begin; whose they are, their nodes and something unique follow, with dashes.
WATCH = "raycrew-watch-"

_lock = threading.Lock()
_owner_lock = threading.RLock()  # a cache alone lets two threads make two
_watches: dict[tuple[str | None, str], Any] = {}


class UnansweredError(Exception):
    """A node's process table can't be asked.

    Attributes:
        node_is_gone: Whether Ray counts the node as dead, so that it has no bundles any more.
    """

    def __init__(self, message: str, *, node_is_gone: bool) -> None:
        super().__init__(message)
        self.node_is_gone = node_is_gone


def watch_owner() -> str:
    """What is in the names of all watches of this process, and of no other's."""
    with _owner_lock:
        return _owner_of(os.getpid())


@functools.cache
def _owner_of(_pid: int) -> str:
    """A process that was forked has a name of its own."""
    return uuid.uuid4().hex[:12]


def stand_by(node_ids: Sequence[str]) -> None:
    """Have watches made on these nodes, without waiting for them."""
    for node_id in dict.fromkeys(node_ids):
        _watch(node_id)


def follow(workers: Sequence[WorkerFacts], patience_s: float = _ANSWER_S) -> None:
    """Have the watches and their keepers remember from now on what these workers start; returns when they do.

    What a worker starts before that would outlive a driver that is killed. A watch that does not answer in
    time is logged and waited for no longer.
    """
    for node_id, answer in ask_within("follow", dict(enumerate(workers)), patience_s).items():
        if isinstance(answer, UnansweredError):
            logger.warning("what workers leave behind may outlive a driver that is killed: %s", answer)
        elif not all(answer):
            lost = f"{answer.count(False)} of {len(answer)} workers of node {node_id}"
            logger.warning("what %s leave behind may outlive a driver that is killed", lost)


def by_node(workers: Mapping[int, WorkerFacts]) -> dict[str, list[int]]:
    """Keys of workers by node."""
    nodes: dict[str, list[int]] = {}
    for key, facts in workers.items():
        nodes.setdefault(facts.node_id, []).append(key)
    return nodes


def ask(
    method: str,
    workers: Mapping[int, WorkerFacts],
    timeout_s: float,
    *,
    details: Mapping[int, Any] | None = None,
    may_make: bool = True,
    patience_s: float | None = None,
) -> dict[str, list[Any] | UnansweredError]:
    """Ask the watches of all these workers at once.

    Args:
        method: A method of `Watch` that takes workers and a time.
        workers: Whom to ask about.
        timeout_s: That time; all answers together may take a moment longer.
        details: What that takes of each of them besides, where it does.
        may_make: Whether a watch is made where there is none.
        patience_s: That moment; None for as long as it may take to make a watch anew.

    Returns:
        By node, the answer for its workers in the order of `by_node`, or why there is none.
    """
    due, nodes = time.monotonic() + timeout_s, by_node(workers)
    times = due, due + (_ANSWER_S if patience_s is None else patience_s)
    # A watch that has to be made first may take all the time there is.
    in_turn = sorted(nodes, key=lambda node_id: (connection(), node_id) not in _watches)
    given: dict[str, tuple[list[Any], ...]] = {}
    for node_id, keys in nodes.items():
        told = [_told(workers[key]) for key in keys]
        given[node_id] = (told,) if details is None else (told, [details[key] for key in keys])
    questions = {node_id: _Question(node_id, method, given[node_id], times, may_make) for node_id in in_turn}
    return {node_id: questions[node_id].answer() for node_id in nodes}


def ask_within(
    method: str, workers: Mapping[int, WorkerFacts], timeout_s: float, *, may_make: bool = True
) -> dict[str, list[Any] | UnansweredError]:
    """`ask` for what takes no time: all answers are there, or given up, after `timeout_s`."""
    return ask(method, workers, timeout_s - _ANSWER_S, may_make=may_make)


class _Question:
    """One question to one node's watch, on its way; all of them are given up at the same time."""

    def __init__(
        self,
        node_id: str,
        method: str,
        given: tuple[list[Any], ...],
        times: tuple[float, float],
        may_make: bool,
    ) -> None:
        self._node_id, self._method = node_id, method
        self._workers, *self._details = given
        self._due, self._given_up = times
        self._may_make = may_make
        self._asked: Any = None
        self._send()

    def _send(self) -> None:
        self._reference = self._failure = None
        try:
            self._asked = self._watch()
            with current_session().while_connected():
                asked = getattr(self._asked, self._method)
                self._reference = asked.remote(self._workers, _left(self._due), *self._details)
        except _FAILURES as error:  # told by the answer: other nodes are asked all the same
            self._failure = error

    def _watch(self) -> Any:
        if self._may_make or (connection(), self._node_id) in _watches:
            return _watch(self._node_id, _left(self._given_up))
        raise WorkerGroupError("it has no watch")

    def answer(self) -> list[Any] | UnansweredError:
        try:
            for _ in range(_TRIES):
                try:
                    return self._take()
                except GetTimeoutError:
                    return self._unanswered("does not answer")
                except RayTaskError as error:  # It lives, and another one would know less.
                    return self._unanswered(f"has a watch that failed: {error}")
                except RayError as error:  # The watch has died, or the node has.
                    problem = error
                if not self._may_make and may_come_back(problem):  # It knows what another one would not.
                    break
                _forget(self._node_id, self._asked)
                if not self._may_make:
                    break
                if not is_alive_node(self._node_id, _left(self._given_up + _LOOK_S)):
                    return self._unanswered("is gone", node_is_gone=True)
                self._send()
        except _FAILURES as error:
            return self._unanswered(f"can't be asked: {error}")
        return self._unanswered(f"has no watch: {problem}")

    def _take(self) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        return current_session().get(self._reference, timeout=_left(self._given_up))  # type: ignore[no-any-return]

    def _unanswered(self, what: str, *, node_is_gone: bool = False) -> UnansweredError:
        return UnansweredError(f"its node {self._node_id} {what}", node_is_gone=node_is_gone)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _told(facts: WorkerFacts) -> watch.Told:
    return facts.pid, facts.started, facts.mark, facts.pid_namespace, facts.memory_limit_bytes


def _watch(node_id: str, timeout_s: float = _ANSWER_S) -> Any:
    session = connection()
    with _lock:
        for other in [key for key in _watches if key[0] != session]:
            del _watches[other]
        known = _watches.get((session, node_id))
    if known is not None:
        return known
    # Not softly: on another node it would read another process table.
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    name = f"{WATCH}{watch_owner()}-{node_id}-{uuid.uuid4().hex[:8]}"
    options = {"scheduling_strategy": here, "name": name}
    made = start_actor(_actor_class(), options, timeout_s, [_sources()])
    with _lock:  # Ray may take its time, for which nobody else should wait
        kept = _watches.setdefault((session, node_id), made)
    if kept is not made:
        end_actors([made])
    return kept


def _forget(node_id: str, dead: Any) -> None:
    with _lock:
        if _watches.get((connection(), node_id)) is dead:
            del _watches[connection(), node_id]


@functools.cache
def _sources() -> dict[str, str]:
    """The texts of what a keeper runs, for nodes where this package is not installed."""
    return {module.__name__: inspect.getsource(module) for module in _KEEPERS}


@functools.cache
def _actor_class() -> Any:
    for module in (*_KEEPERS, ring, page, sight, limits, stacks, leavings, examining, watch):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return ray.remote(num_cpus=0, max_restarts=0)(watch.Watch)
