"""The watches of this driver's session: one on each node that it has workers on, asked with deadlines."""

import contextlib
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups._health import family, marks, process_table, watch
from raycrew.worker_groups._ranks import WorkerFacts
from raycrew.worker_groups._ray import connection, current_session, is_alive_node, start_actor
from raycrew.worker_groups.errors import WorkerGroupError

_ANSWER_S = 10.0  # for a watch to be made anew and to answer, besides what it is asked to wait
_TRIES = 3

_lock = threading.Lock()
_watches: dict[tuple[str | None, str], Any] = {}


class UnansweredError(Exception):
    """A node's process table can't be asked.

    Attributes:
        node_is_gone: Whether Ray counts the node as dead, so that it has no bundles any more.
    """

    def __init__(self, message: str, *, node_is_gone: bool) -> None:
        super().__init__(message)
        self.node_is_gone = node_is_gone


def stand_by(node_ids: Sequence[str]) -> None:
    """Have watches made on these nodes, without waiting for them."""
    for node_id in dict.fromkeys(node_ids):
        _watch(node_id)


def follow(workers: Sequence[WorkerFacts]) -> None:
    """Have the watches remember from now on what these workers start, without waiting for them."""
    for node_id, here in by_node(dict(enumerate(workers))).items():
        _watch(node_id).follow.remote([_told(workers[key]) for key in here])


def by_node(workers: Mapping[int, WorkerFacts]) -> dict[str, list[int]]:
    """Keys of workers by node."""
    nodes: dict[str, list[int]] = {}
    for key, facts in workers.items():
        nodes.setdefault(facts.node_id, []).append(key)
    return nodes


def ask(
    method: str, workers: Mapping[int, WorkerFacts], timeout_s: float
) -> dict[str, list[Any] | UnansweredError]:
    """Ask the watches of all these workers at once.

    Args:
        method: A method of `Watch` that takes workers and a time.
        workers: Whom to ask about.
        timeout_s: That time; an answer may take a moment longer.

    Returns:
        By node, the answer for its workers in the order of `by_node`, or why there is none.
    """
    deadline = time.monotonic() + timeout_s
    questions = {
        node_id: _Question(node_id, method, [_told(workers[key]) for key in keys], deadline)
        for node_id, keys in by_node(workers).items()
    }
    return {node_id: question.answer() for node_id, question in questions.items()}


class _Question:
    """One question to one node's watch, on its way."""

    def __init__(self, node_id: str, method: str, workers: list[watch.Told], deadline: float) -> None:
        self._node_id, self._method, self._workers, self._deadline = node_id, method, workers, deadline
        self._send()

    def _send(self) -> None:
        self._reference = None
        with contextlib.suppress(GetTimeoutError):  # Ray makes no watch now
            self._asked = _watch(self._node_id)
            left_s = max(0.0, self._deadline - time.monotonic())
            self._reference = getattr(self._asked, self._method).remote(self._workers, left_s)

    def answer(self) -> list[Any] | UnansweredError:
        tries = _TRIES
        while True:
            tries -= 1
            if self._reference is None:
                return self._unanswered("gets no watch, as Ray does not answer", node_is_gone=False)
            try:
                left_s = max(0.0, self._deadline - time.monotonic())
                return current_session().get(self._reference, timeout=left_s + _ANSWER_S)  # type: ignore[no-any-return]
            except GetTimeoutError:
                return self._unanswered("does not answer", node_is_gone=False)
            except (ClusterClosedError, WorkerGroupError) as error:
                return self._unanswered(f"can't be asked any more: {error}", node_is_gone=False)
            except RayError as error:  # The watch has died, or the node has.
                _forget(self._node_id, self._asked)
                if not is_alive_node(self._node_id):
                    return self._unanswered("is gone", node_is_gone=True)
                if not tries:
                    return self._unanswered(f"has no watch: {error}", node_is_gone=False)
                self._send()

    def _unanswered(self, what: str, *, node_is_gone: bool) -> UnansweredError:
        return UnansweredError(f"its node {self._node_id} {what}", node_is_gone=node_is_gone)


def _told(facts: WorkerFacts) -> watch.Told:
    return facts.pid, facts.started, facts.mark, facts.pid_namespace


def _watch(node_id: str) -> Any:
    session = connection()
    with _lock:
        for other in [key for key in _watches if key[0] != session]:
            del _watches[other]
        if (session, node_id) not in _watches:
            # Not softly: on another node it would read another process table.
            here = NodeAffinitySchedulingStrategy(node_id, soft=False)
            _watches[session, node_id] = start_actor(_actor_class(), {"scheduling_strategy": here})
        return _watches[session, node_id]


def _forget(node_id: str, dead: Any) -> None:
    with _lock:
        if _watches.get((connection(), node_id)) is dead:
            del _watches[connection(), node_id]


@functools.cache
def _actor_class() -> Any:
    for module in (process_table, marks, family, watch):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return ray.remote(num_cpus=0, max_restarts=0)(watch.Watch)
