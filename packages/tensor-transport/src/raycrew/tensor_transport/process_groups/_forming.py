"""The driver's side: invite the ranks of several worker groups into one group."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from raycrew.tensor_transport._ray import answered
from raycrew.tensor_transport.process_groups._host import GroupHost
from raycrew.tensor_transport.process_groups._membership import member_names, ranks_of
from raycrew.tensor_transport.process_groups._process import Deadline
from raycrew.tensor_transport.protocols import PeerGroup, PeerResults

_ANSWER_S = 5.0


def form_group(
    host: GroupHost,
    peers: Mapping[str, PeerGroup],
    method: str = "join_group",
    *,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Open the next generation of a group, and have every rank of some worker groups join it.

    Args:
        host: Whose members are those of `peers`: `GroupHost(name, member_names(peers))`.
        peers: Worker groups by their part, such as `{"trainer": …, "generator": …}`; ranks of the group count
            through them in this order.
        method: Of the workers: takes an `Invitation`, and calls `join_group` with it. A place in an earlier
            generation is to be closed there, before or afterwards.
        timeout_s: Deadline for all of them.

    Returns:
        What the method returned, in rank order.

    Raises:
        ValueError: The host has other members.
        Exception: What the first member that failed raised; its notes name the others.
    """
    deadline = Deadline.within(timeout_s)
    if member_names(peers) != host.members:
        raise ValueError(f"the host's members are {host.members}, those to invite {member_names(peers)}")
    places = [(group, rank) for group in peers.values() for rank in ranks_of(group)]
    calls: dict[str, PeerResults] = {}
    failures: dict[str, Exception] = {}
    try:
        for (group, rank), invitation in zip(places, host.open(), strict=True):
            try:
                calls[invitation.member] = group.on(ranks=[rank]).call(method, invitation)
            except Exception as error:  # noqa: BLE001 - raised when all have been called
                failures[invitation.member] = error
        results = _answers(host, calls, deadline, failures)
    except BaseException:
        host.end("whoever formed it was interrupted")
        raise
    _raise_first(failures)
    return [result for member in host.members for result in results[member]]


def _answers(
    host: GroupHost, calls: Mapping[str, PeerResults], deadline: Deadline, failures: dict[str, Exception]
) -> dict[str, Sequence[Any]]:
    """By member the results of its call; failures are noted in the order in which they come.

    After the first one the others don't wait any more for whoever does not come.
    """

    def fail(member: str, error: Exception) -> None:
        failures[member] = error
        host.end(f"{member} did not join: {error}")

    def answer(member: str) -> Sequence[Any]:
        try:
            left_s = deadline.left_s + _ANSWER_S
            return answered(calls[member], left_s, partial(fail, member))  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 - raised when all have answered
            fail(member, error)
            return ()

    if failures:
        host.end("not all could be called")
    pool = ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="form-group")
    try:
        return dict(zip(calls, pool.map(answer, calls), strict=True))
    finally:
        pool.shutdown(wait=False)


def _raise_first(failures: Mapping[str, Exception]) -> None:
    if failures:
        (member, error), *others = failures.items()
        error.add_note(f"{member} did not join the group")
        for other, failure in others:
            error.add_note(f"{other} did not join either: {failure}")
        raise error
