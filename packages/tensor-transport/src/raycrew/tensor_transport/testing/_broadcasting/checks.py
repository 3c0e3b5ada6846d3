"""What every `BroadcastTransport` promises, as a list of checks."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from raycrew.tensor_transport.errors import (
    ShardLostError,
    TransferCancelledError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.testing._broadcasting.members import (
    DEADLINE_S,
    MIB,
    begin_in_order,
    end_while_sending,
    leftovers,
    move_within_memory,
    receive_and_stop,
    receive_contents,
    receive_until_it_fails,
    send_contents,
    send_until_it_fails,
)

_GROUPS = 4  # So often in a row does a process that leaks grow.


class BroadcastPeer(Protocol):
    """A process that is a member of the group under test."""

    pid: int

    def begin(self, fn: Callable[..., Any], *args: Any) -> None:
        """Have `fn(transport, *args)` called over there; one call at a time."""
        ...

    def result(self) -> Any:
        """What the call that was begun returned; raises what it raised, and TimeoutError if it hangs."""
        ...


GroupMaker = Callable[[], Sequence[BroadcastPeer]]
"""Three members, in rank order, of a group that has not been used yet; processes may be those of the last."""


@dataclass(frozen=True)
class BroadcastCase:
    """A broadcast transport under test.

    Attributes:
        make: Starts a group, of processes that are there or anew.
        device: Where the transport moves bytes.
    """

    make: GroupMaker
    device: str = "cpu"

    def checks(self) -> Sequence[Callable[[], None]]:
        """See `TransportCase.checks`."""
        return [
            *(partial(self._run, check) for check in _CHECKS),
            partial(self._run_groups, _check_nothing_left),
        ]

    def _run(self, check: Callable[[Sequence[BroadcastPeer], str], None]) -> None:
        check(self.make(), self.device)

    def _run_groups(self, check: Callable[[GroupMaker, str], None]) -> None:
        check(self.make, self.device)


def _together(peers: Sequence[BroadcastPeer], kind: str, seed: int, device: str) -> None:
    for rank, peer in enumerate(peers):
        peer.begin(receive_contents if rank else send_contents, kind, seed, DEADLINE_S, device)
    for peer in peers[1:]:
        _check(peer.result(), f"other bytes than those sent arrived ({kind})")
    peers[0].result()


def _check_contents(peers: Sequence[BroadcastPeer], device: str) -> None:
    for seed, kind in enumerate(("samples", "tiny", "oversized", "plain")):
        _together(peers, kind, seed, device)


def _check_memory(peers: Sequence[BroadcastPeer], device: str) -> None:
    for rank, peer in enumerate(peers):
        peer.begin(move_within_memory, "receive" if rank else "send", device)
    for peer in peers:
        peer.result()


def _check_order(peers: Sequence[BroadcastPeer], device: str) -> None:
    for rank, peer in enumerate(peers):
        peer.begin(begin_in_order, "receive" if rank else "send", device)
    right = [peer.result() for peer in peers]
    _check(all(right), "transfers that were under way together met each other")


def _check_mismatch(peers: Sequence[BroadcastPeer], device: str) -> None:
    """Members that want different things all hear of it, nothing moves, and the group goes on."""
    for roles in (
        [(send_contents, "plain"), (receive_contents, "samples"), (receive_contents, "plain")],
        [(send_contents, "plain"), (send_contents, "plain"), (receive_contents, "plain")],
        [(receive_contents, "plain")] * 3,
    ):
        for peer, (fn, kind) in zip(peers, roles, strict=True):
            peer.begin(fn, kind, 0, DEADLINE_S, device)
        for peer in peers:
            _expect(peer, ValueError)
        _together(peers, "plain", 1, device)


def _check_absent(peers: Sequence[BroadcastPeer], device: str) -> None:
    """A member that does not take part is a deadline for the others, and too late afterwards."""
    peers[0].begin(send_contents, "plain", 0, 2.0, device)
    peers[1].begin(receive_contents, "plain", 0, 2.0, device)
    for peer in peers[:2]:
        _expect(peer, TransportTimeoutError)
    peers[2].begin(receive_contents, "plain", 0, DEADLINE_S, device)
    _expect(peers[2], TransportError)


def _check_killed(peers: Sequence[BroadcastPeer], device: str) -> None:
    """A member that is gone before the next operation is named soon, long before the deadline."""
    _together(peers, "plain", 0, device)
    _kill(peers[2])
    begun = time.monotonic()
    peers[0].begin(send_contents, "plain", 0, DEADLINE_S, device)
    peers[1].begin(receive_contents, "plain", 0, DEADLINE_S, device)
    for peer in peers[:2]:
        _expect(peer, ShardLostError)
    _check(time.monotonic() - begun < DEADLINE_S, "a lost member was noticed by the deadline alone")


def _check_killed_within(peers: Sequence[BroadcastPeer], device: str) -> None:
    """A member dies in the middle."""
    marker = Path(f"/tmp/broadcast-{os.getpid()}-{time.monotonic_ns()}")
    peers[0].begin(send_until_it_fails, 8 * MIB, str(marker), device)
    for peer in peers[1:]:
        peer.begin(receive_until_it_fails, 8 * MIB, device)
    end = time.monotonic() + DEADLINE_S
    while not marker.exists() and time.monotonic() < end:
        time.sleep(0.01)
    marker.unlink()
    _kill(peers[1])
    for peer in (peers[0], peers[2]):
        _expect(peer, ShardLostError)


def _check_closed(peers: Sequence[BroadcastPeer], device: str) -> None:
    _end_while_sending(peers, "close", TransportClosedError, device)


def _check_cancelled(peers: Sequence[BroadcastPeer], device: str) -> None:
    _end_while_sending(peers, "cancel", TransferCancelledError, device)


def _end_while_sending(peers: Sequence[BroadcastPeer], how: str, error: type[Exception], device: str) -> None:
    """The sender ends it while one member stands still: nobody waits for the deadline."""
    peers[0].begin(end_while_sending, how, 90 * MIB, device)
    peers[1].begin(receive_until_it_fails, 90 * MIB, device)
    peers[2].begin(receive_and_stop, 90 * MIB, device)
    try:
        ended = peers[0].result()
        _check(ended == error.__name__, f"{how} ended the transfer with {ended}")
        _expect(peers[1], TransportError)
    finally:
        _go_on(peers[2])
    _expect(peers[2], TransportError)


_CHECKS = (
    _check_contents,
    _check_memory,
    _check_order,
    _check_mismatch,
    _check_absent,
    _check_killed,
    _check_killed_within,
    _check_closed,
    _check_cancelled,
)


def _check_nothing_left(make: GroupMaker, device: str) -> None:
    """A process that is a member of one group after another does not grow with each of them."""
    sizes = [_sizes_after(make(), 0, device)]
    for seed in range(1, _GROUPS):
        sizes.append(_sizes_after(make(), seed, device))
        if not _has_grown(*sizes[-2:]):
            return
    raise AssertionError(f"threads and descriptors of members grew: {sizes}")


def _sizes_after(peers: Sequence[BroadcastPeer], seed: int, device: str) -> dict[int, tuple[int, ...]]:
    _together(peers, "samples", seed, device)
    for peer in peers:
        peer.begin(leftovers)
    return {peer.pid: peer.result() for peer in peers}


def _has_grown(before: Mapping[int, tuple[int, ...]], after: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether a process that is in both has more threads, descriptors or mappings than before."""
    return any(
        now > then
        for pid in before.keys() & after.keys()
        for now, then in zip(after[pid], before[pid], strict=True)
    )


def _expect(peer: BroadcastPeer, kind: type[BaseException]) -> None:
    try:
        found = peer.result()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was expected, and the member returned {found!r}")


def _go_on(peer: BroadcastPeer) -> None:
    """Continue a process once it has stopped itself, which it may do late where devices are shared."""
    end = time.monotonic() + DEADLINE_S
    while _state(peer.pid) not in "TZ" and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(peer.pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _kill(peer: BroadcastPeer) -> None:
    os.kill(peer.pid, signal.SIGKILL)


def _check(good: object, complaint: str) -> None:
    if not good:
        raise AssertionError(complaint)
