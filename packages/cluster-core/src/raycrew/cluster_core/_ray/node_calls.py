"""One function on each of several nodes."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core._ray.gate import check_connected
from raycrew.cluster_core._ray.questions import cancel_tasks, start_tasks
from raycrew.cluster_core._ray.session import Session
from raycrew.cluster_core.errors import ClusterError, NodeCallError, NodeCallTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def run_on_nodes(
    node_ids: Iterable[str], fn: Callable[[], T], timeout_s: float | None = 120.0
) -> Iterator[tuple[str, T]]:
    """Start `fn` on each node at once; yield (node id, result) as nodes finish.

    A node that can't take the call (it died meanwhile, it is being drained) is left out with a warning.

    Args:
        node_ids: Ray node ids.
        fn: Takes no arguments; it and its result travel by pickle. It needs no CPU slot.
        timeout_s: Seconds for all nodes together; None waits for ever.

    Raises:
        NodeCallError: `fn` raised on one node; the cause is its exception. Raised last, so that no other
            result is lost.
        NodeCallTimeoutError: A node did not finish in time; its call is cancelled.
        ExceptionGroup: Of such errors, when there are several.
        ClusterClosedError: The connection to Ray ended meanwhile.
        GetTimeoutError: Ray's control service, which `fn` goes to first, does not answer.
    """

    def call() -> T:  # A closure of any callable travels by value.
        return fn()

    session = check_connected()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    nodes = list(node_ids)
    strategies = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in nodes]
    refs = start_tasks(call, [{"scheduling_strategy": strategy} for strategy in strategies])
    pending: dict[Any, str] = dict(zip(refs, nodes, strict=True))
    return _collect(pending, getattr(fn, "__qualname__", repr(fn)), deadline, timeout_s, session)


def _collect(
    pending: dict[Any, str],
    name: str,
    deadline: float | None,
    timeout_s: float | None,
    session: Session,
) -> Iterator[tuple[str, Any]]:
    failures: list[ClusterError] = []
    try:
        while pending:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            done, _ = session.wait(list(pending), timeout=left)
            if not done:
                failures += [_late(name, node_id, timeout_s) for node_id in pending.values()]
                break
            node_id = pending.pop(done[0])
            try:
                result = session.get(done[0])
            except RayTaskError as error:
                failures.append(_failed(name, node_id, error))
            except RayError as error:
                logger.warning("node %s takes no call of %s and is left out: %s", node_id, name, error)
            else:
                yield node_id, result
    finally:
        cancel_tasks(pending, session)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"{name} failed on {len(failures)} nodes", failures)


def _failed(name: str, node_id: str, raised: RayTaskError) -> NodeCallError:
    cause = raised.cause if isinstance(raised.cause, Exception) else raised
    error = NodeCallError(f"{name} failed on node {node_id}: {cause!r}", node_id)
    error.__cause__ = cause
    return error


def _late(name: str, node_id: str, timeout_s: float | None) -> NodeCallTimeoutError:
    return NodeCallTimeoutError(f"{name} did not finish within {timeout_s:g} s on node {node_id}", node_id)
