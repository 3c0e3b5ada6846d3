"""What every `BroadcastTransport` promises, as one function that all of them pass."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from raycrew.tensor_transport.errors import (
    ShardLostError,
    TransferCancelledError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.transports import BroadcastTransport, Transfer

_DEADLINE_S = 60.0
_MIB = 1 << 20
_GROUPS = 4  # So often in a row does a process that leaks grow.
_DTYPES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2 "
    "float8_e8m0fnu float4_e2m1fn_x2"
)


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


def check_broadcast_transport(make: GroupMaker, device: str = "cpu") -> None:
    """Raise AssertionError unless a transport keeps every promise of `BroadcastTransport`.

    Args:
        make: Starts a group, of processes that are there or anew.
        device: Where the transport moves bytes.
    """
    for check in (
        _check_contents,
        _check_order,
        _check_mismatch,
        _check_absent,
        _check_killed,
        _check_killed_within,
        _check_closed,
        _check_cancelled,
    ):
        check(make(), device)
    _check_nothing_left(make, device)


def contents(kind: str, seed: int, device: str = "cpu") -> list[torch.Tensor]:
    """Recognisable tensors: "dtypes", "tiny" (thousands of them), "oversized" or "plain"."""
    random = np.random.default_rng(seed)

    def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        raw = torch.from_numpy(random.integers(0, high, size, dtype=np.uint8))
        return raw.view(dtype).reshape(shape).to(device)

    if kind == "tiny":
        return [of(torch.float32, 1 + index % 7) for index in range(3000)]
    if kind == "oversized":
        return [of(torch.uint8, 3), of(torch.bfloat16, 45 * _MIB), of(torch.uint8, 5)]
    if kind == "plain":
        return [of(torch.uint8, 20 * _MIB)]
    dtypes = [getattr(torch, name) for name in _DTYPES.split() if hasattr(torch, name)]
    some = [of(dtype, 3, 4) for dtype in dtypes]
    square = of(torch.float32, 16, 16)
    tied = of(torch.float32, 5)
    return [
        *some,
        square.t(),
        square[:, ::2],
        tied,
        tied,
        of(torch.float64),
        torch.empty(0, 3, device=device),
    ]


def send_contents(
    transport: BroadcastTransport, kind: str, seed: int, timeout_s: float = _DEADLINE_S, device: str = "cpu"
) -> None:
    """Send; run by a member."""
    transport.send(contents(kind, seed, device), window_bytes=_MIB, timeout_s=timeout_s).wait()


def receive_contents(
    transport: BroadcastTransport, kind: str, seed: int, timeout_s: float = _DEADLINE_S, device: str = "cpu"
) -> bool:
    """Receive, and say whether these were the bytes; run by a member."""
    wanted = contents(kind, seed, device)
    found = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in wanted]
    transport.receive(found, window_bytes=_MIB, timeout_s=timeout_s).wait()
    return all(_raw(one) == _raw(other) for one, other in zip(found, wanted, strict=True))


def send_until_it_fails(transport: BroadcastTransport, size_bytes: int, marker: str, device: str) -> None:
    """Send again and again; run by a member. The marker is there once some were sent."""
    data = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    for _ in range(3):
        transport.send([data], timeout_s=_DEADLINE_S).wait()
    Path(marker).touch()
    while True:
        transport.send([data], timeout_s=_DEADLINE_S).wait()


def receive_until_it_fails(transport: BroadcastTransport, size_bytes: int, device: str) -> None:
    """Receive again and again; run by a member."""
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    while True:
        transport.receive([data], timeout_s=_DEADLINE_S).wait()


def receive_and_stop(transport: BroadcastTransport, size_bytes: int, device: str) -> None:
    """Stop this process as soon as bytes arrive, and go on once it is continued; run by a member."""
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    transfer = transport.receive([data], window_bytes=_MIB, timeout_s=_DEADLINE_S)
    while not data[0].item() and not transfer.done():
        time.sleep(0.0001)
    os.kill(os.getpid(), signal.SIGSTOP)
    transfer.wait()
    receive_until_it_fails(transport, size_bytes, device)


def end_while_sending(transport: BroadcastTransport, how: str, size_bytes: int, device: str) -> str:
    """Send until somebody stands still, then close or cancel; run by a member. How the transfer ended."""
    data = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    transfer = transport.send([data], window_bytes=_MIB, timeout_s=_DEADLINE_S)
    while _ends_soon(transfer):
        transfer = transport.send([data], window_bytes=_MIB, timeout_s=_DEADLINE_S)
    if how == "close":
        transport.close()
    else:
        transfer.cancel()
    return type(transfer.exception(_DEADLINE_S)).__name__


def _ends_soon(transfer: Transfer) -> bool:
    try:
        transfer.wait(1.0)
    except TransportTimeoutError:
        return False
    return True


def begin_in_order(transport: BroadcastTransport, role: str, device: str) -> bool:
    """Begin several transfers, and wait for them afterwards; run by a member."""
    kinds = ["plain", "dtypes", "tiny", "plain"]
    wanted = [contents(kind, seed, device) for seed, kind in enumerate(kinds)]
    if role == "send":
        for transfer in [transport.send(each, timeout_s=_DEADLINE_S) for each in wanted]:
            transfer.wait()
        return True
    found = [[torch.empty(t.shape, dtype=t.dtype, device=device) for t in each] for each in wanted]
    for transfer in [transport.receive(each, timeout_s=_DEADLINE_S) for each in found]:
        transfer.wait()
    pairs = [pair for one, other in zip(found, wanted, strict=True) for pair in zip(one, other, strict=True)]
    return all(_raw(one) == _raw(other) for one, other in pairs)


def leftovers(transport: BroadcastTransport) -> tuple[int, int]:
    """Threads and descriptors of a member that has closed its transport; run by a member."""
    transport.close()
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _together(peers: Sequence[BroadcastPeer], kind: str, seed: int, device: str) -> None:
    for rank, peer in enumerate(peers):
        peer.begin(receive_contents if rank else send_contents, kind, seed, _DEADLINE_S, device)
    for peer in peers[1:]:
        _check(peer.result(), f"other bytes than those sent arrived ({kind})")
    peers[0].result()


def _check_contents(peers: Sequence[BroadcastPeer], device: str) -> None:
    for seed, kind in enumerate(("dtypes", "tiny", "oversized", "plain")):
        _together(peers, kind, seed, device)


def _check_order(peers: Sequence[BroadcastPeer], device: str) -> None:
    for rank, peer in enumerate(peers):
        peer.begin(begin_in_order, "receive" if rank else "send", device)
    right = [peer.result() for peer in peers]
    _check(all(right), "transfers that were under way together met each other")


def _check_mismatch(peers: Sequence[BroadcastPeer], device: str) -> None:
    """Members that want different things all hear of it, nothing moves, and the group goes on."""
    for roles in (
        [(send_contents, "plain"), (receive_contents, "dtypes"), (receive_contents, "plain")],
        [(send_contents, "plain"), (send_contents, "plain"), (receive_contents, "plain")],
        [(receive_contents, "plain")] * 3,
    ):
        for peer, (fn, kind) in zip(peers, roles, strict=True):
            peer.begin(fn, kind, 0, _DEADLINE_S, device)
        for peer in peers:
            _expect(peer, ValueError)
        _together(peers, "plain", 1, device)


def _check_absent(peers: Sequence[BroadcastPeer], device: str) -> None:
    """A member that does not take part is a deadline for the others, and too late afterwards."""
    peers[0].begin(send_contents, "plain", 0, 2.0, device)
    peers[1].begin(receive_contents, "plain", 0, 2.0, device)
    for peer in peers[:2]:
        _expect(peer, TransportTimeoutError)
    peers[2].begin(receive_contents, "plain", 0, _DEADLINE_S, device)
    _expect(peers[2], TransportError)


def _check_killed(peers: Sequence[BroadcastPeer], device: str) -> None:
    """A member that is gone before the next operation is named soon, long before the deadline."""
    _together(peers, "plain", 0, device)
    _kill(peers[2])
    begun = time.monotonic()
    peers[0].begin(send_contents, "plain", 0, _DEADLINE_S, device)
    peers[1].begin(receive_contents, "plain", 0, _DEADLINE_S, device)
    for peer in peers[:2]:
        _expect(peer, ShardLostError)
    _check(time.monotonic() - begun < _DEADLINE_S, "a lost member was noticed by the deadline alone")


def _check_killed_within(peers: Sequence[BroadcastPeer], device: str) -> None:
    """A member dies in the middle."""
    marker = Path(f"/tmp/broadcast-{os.getpid()}-{time.monotonic_ns()}")
    peers[0].begin(send_until_it_fails, 8 * _MIB, str(marker), device)
    for peer in peers[1:]:
        peer.begin(receive_until_it_fails, 8 * _MIB, device)
    end = time.monotonic() + _DEADLINE_S
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
    peers[0].begin(end_while_sending, how, 90 * _MIB, device)
    peers[1].begin(receive_until_it_fails, 90 * _MIB, device)
    peers[2].begin(receive_and_stop, 90 * _MIB, device)
    try:
        ended = peers[0].result()
        _check(ended == error.__name__, f"{how} ended the transfer with {ended}")
        _expect(peers[1], TransportError)
    finally:
        os.kill(peers[2].pid, signal.SIGCONT)
    _expect(peers[2], TransportError)


def _check_nothing_left(make: GroupMaker, device: str) -> None:
    """A process that is a member of one group after another does not grow with each of them."""
    sizes = [_sizes_after(make(), 0, device)]
    for seed in range(1, _GROUPS):
        sizes.append(_sizes_after(make(), seed, device))
        if not _has_grown(*sizes[-2:]):
            return
    raise AssertionError(f"threads and descriptors of members grew: {sizes}")


def _sizes_after(peers: Sequence[BroadcastPeer], seed: int, device: str) -> dict[int, tuple[int, int]]:
    _together(peers, "dtypes", seed, device)
    for peer in peers:
        peer.begin(leftovers)
    return {peer.pid: peer.result() for peer in peers}


def _has_grown(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> bool:
    """Whether a process that is in both has more threads, or more descriptors, than before."""
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


def _kill(peer: BroadcastPeer) -> None:
    os.kill(peer.pid, signal.SIGKILL)


def _check(good: object, complaint: str) -> None:
    if not good:
        raise AssertionError(complaint)
