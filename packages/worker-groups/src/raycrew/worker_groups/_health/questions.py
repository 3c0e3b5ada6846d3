"""Questions to the watches of workers' nodes, each with a deadline: what one takes makes no other late."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups._health.watches import Told, forget_watch, has_watch, watch_on
from raycrew.worker_groups._ray import current_session, is_alive_node, may_come_back
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import WorkerFacts

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # for a watch to be made anew and to answer, besides what it is asked to wait
_LOOK_S = 1.0  # for a look at what nodes there are, when all that is over
_TRIES = 3
_FAILURES = (RayError, ClusterClosedError, WorkerGroupError)


class UnansweredError(Exception):
    """A node's process table can't be asked.

    Attributes:
        node_is_gone: Whether Ray counts the node as dead, so that it has no bundles any more.
    """

    def __init__(self, message: str, *, node_is_gone: bool) -> None:
        super().__init__(message)
        self.node_is_gone = node_is_gone


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


class Answer(NamedTuple):
    """What a node's watch has told, and between which two moments of this process's clock it has.

    Attributes:
        told: Of its workers, in the order of `by_node`.
        asked: When the question was sent.
        came: When its answer was there, whatever other nodes took.
    """

    told: list[Any]
    asked: float
    came: float


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
    answers = _ask(method, workers, timeout_s, patience_s, may_make, details)
    return {node: got.told if isinstance(got, Answer) else got for node, got in answers.items()}


def ask_within(
    method: str, workers: Mapping[int, WorkerFacts], timeout_s: float, *, may_make: bool = True
) -> dict[str, list[Any] | UnansweredError]:
    """`ask` for what takes no time: all answers are there, or given up, after `timeout_s`."""
    return ask(method, workers, timeout_s - _ANSWER_S, may_make=may_make)


def ask_timed(
    method: str,
    workers: Mapping[int, WorkerFacts],
    timeout_s: float,
    details: Mapping[int, Any],
    *,
    may_make: bool,
) -> dict[str, Answer | UnansweredError]:
    """`ask_within`, with when each node was asked and has answered.

    Args:
        method: A method of `Watch` that takes workers, a time and details of each worker.
        workers: Whom to ask about.
        timeout_s: Seconds after which all answers are there, or given up.
        details: What that takes of each of them besides.
        may_make: Whether a watch is made where there is none.
    """
    return _ask(method, workers, timeout_s - _ANSWER_S, None, may_make, details)


def _ask(
    method: str,
    workers: Mapping[int, WorkerFacts],
    timeout_s: float,
    patience_s: float | None,
    may_make: bool,
    details: Mapping[int, Any] | None = None,
) -> dict[str, Answer | UnansweredError]:
    due, nodes = time.monotonic() + timeout_s, by_node(workers)
    times = due, due + (_ANSWER_S if patience_s is None else patience_s)
    # A watch that has to be made first may take all the time there is.
    in_turn = sorted(nodes, key=has_watch, reverse=True)
    questions = {}
    for node_id in in_turn:
        told = [_told(workers[key]) for key in nodes[node_id]]
        besides = () if details is None else ([details[key] for key in nodes[node_id]],)
        questions[node_id] = _Question(node_id, method, (told, besides), times, may_make)
    found = dict(_answers(questions, times[1]))
    return {node_id: found[node_id] for node_id in nodes}


def _answers(
    questions: Mapping[str, "_Question"], given_up: float
) -> Iterator[tuple[str, Answer | UnansweredError]]:
    """What nodes answer, as it comes: one that is silent makes nobody else's late."""
    waiting = dict(questions)
    while waiting:
        for node_id in _arrived(waiting, given_up):
            if (answer := waiting[node_id].answer()) is not None:
                del waiting[node_id]
                yield node_id, answer


def _arrived(waiting: Mapping[str, "_Question"], given_up: float) -> list[str]:
    """Nodes whose answers are there, or where something has failed; all of them once it is too late."""
    sent = {node_id: question.reference for node_id, question in waiting.items()}
    if failed := [node_id for node_id, reference in sent.items() if reference is None]:
        return failed
    try:
        session, all_of_them = current_session(), list(sent.values())
        ready, pending = session.wait(all_of_them, num_returns=1, timeout=_left(given_up))
        if ready and pending:
            ready, _ = session.wait(all_of_them, num_returns=len(all_of_them), timeout=0.0)
    except _FAILURES:  # each question says so of its node
        return list(sent)
    came, there = time.monotonic(), set(ready)
    arrived = [node_id for node_id, reference in sent.items() if reference in there]
    for node_id in arrived:
        waiting[node_id].came = came
    return arrived or list(sent)


class _NodeGoneError(WorkerGroupError):
    """Ray counts the node as dead."""


class _Question:
    """One question to one node's watch, on its way; all of them are given up at the same time."""

    def __init__(
        self,
        node_id: str,
        method: str,
        asked: tuple[list[Told], tuple[Any, ...]],
        times: tuple[float, float],
        may_make: bool,
    ) -> None:
        self._node_id, self._method, (self._workers, self._details) = node_id, method, asked
        self._due, self._given_up = times
        self._may_make, self._tries = may_make, _TRIES
        self._asked: Any = None
        self._sent = 0.0
        self._send()

    def _send(self) -> None:
        self.reference = self._failure = None
        self.came: float | None = None
        self._tries -= 1
        try:
            self._asked = self._watch()
            with current_session().while_connected():
                ask = getattr(self._asked, self._method)
                self._sent = time.monotonic()
                self.reference = ask.remote(self._workers, _left(self._due), *self._details)
        except _FAILURES as error:  # told by the answer: other nodes are asked all the same
            self._failure = error

    def _watch(self) -> Any:
        if not has_watch(self._node_id):
            self._check_node()  # on one that is gone Ray would let us wait for the watch
            if not self._may_make:
                raise WorkerGroupError("it has no watch")
        return watch_on(self._node_id, _left(self._given_up))

    def _check_node(self) -> None:
        if not is_alive_node(self._node_id, _left(self._given_up + _LOOK_S)):
            raise _NodeGoneError(self._node_id)

    def answer(self) -> Answer | UnansweredError | None:
        """What has come, or that nothing has; None where another watch was asked in place of a dead one."""
        try:
            told = self._take()  # which may have come since the last look
            return Answer(told, self._sent, time.monotonic() if self.came is None else self.came)
        except GetTimeoutError:
            return self._unanswered("does not answer")
        except RayTaskError as error:  # It lives, and another one would know less.
            return self._unanswered(f"has a watch that failed: {error}")
        except RayError as error:  # The watch has died, or the node has.
            return self._ask_another(error)
        except _NodeGoneError:
            return self._unanswered("is gone", node_is_gone=True)
        except _FAILURES as error:
            return self._unanswered(f"can't be asked: {error}")

    def _ask_another(self, problem: RayError) -> UnansweredError | None:
        # One that may come back knows what another one would not.
        if self._may_make or not may_come_back(problem):
            forget_watch(self._node_id, self._asked)
        try:
            self._check_node()
        except _NodeGoneError:
            return self._unanswered("is gone", node_is_gone=True)
        except _FAILURES as error:
            return self._unanswered(f"can't be asked: {error}")
        if not self._may_make or not self._tries:
            return self._unanswered(f"has no watch: {problem}")
        self._send()
        return None

    def _take(self) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        return current_session().get(self.reference, timeout=_left(self._given_up))  # type: ignore[no-any-return]

    def _unanswered(self, what: str, *, node_is_gone: bool = False) -> UnansweredError:
        return UnansweredError(f"its node {self._node_id} {what}", node_is_gone=node_is_gone)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _told(facts: WorkerFacts) -> Told:
    return facts.pid, facts.started, facts.mark, facts.pid_namespace, facts.memory_limit_bytes
