"""What every `ShardBackend` promises, as one function that all of them pass."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import torch

from raycrew.tensor_transport._handles import ShardRegistry
from raycrew.tensor_transport._rows import ShardRead, TensorShardInfo
from raycrew.tensor_transport.errors import (
    ShardError,
    ShardLostError,
    StaleHandleError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.protocols import ShardBackend
from raycrew.tensor_transport.rtensor import RTensor


class Peer(Protocol):
    """Another process that has the backend under test."""

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(backend, *args)` over there; raises what it raises."""
        ...

    def kill(self) -> None:
        """End the process at once (SIGKILL), and wait until it is gone."""
        ...


Stall: TypeAlias = Callable[
    [Any, Sequence[TensorShardInfo]], contextlib.AbstractContextManager[Sequence[TensorShardInfo]]
]


@dataclass(frozen=True)
class BackendCase:
    """A backend under test, and what it promises.

    Attributes:
        backend: As this process uses it.
        start_peer: Starts another process with the same backend.
        outlives_producer: Whether shards stay readable when the process that put them is killed.
        is_released: Whether shards are released by name and step, not by their last handle.
        restart_owner: Ends the owner of what `backend` stored and starts it anew; None where the owner is the
            process itself.
        stall: Keeps whoever a read of a peer's shards waits for from answering, until the context ends; the
            context is entered with the shards to read (those given, or later ones). None where a read waits
            for nobody.
    """

    backend: ShardBackend
    start_peer: Callable[[], Peer]
    outlives_producer: bool
    is_released: bool
    restart_owner: Callable[[], None] | None = None
    stall: Stall | None = None


def check_shard_backend(case: BackendCase) -> None:
    """Raise AssertionError unless a backend keeps every promise of `ShardBackend`.

    Producer killed, consumer killed, stale handles, slow readers and cancelled reads included. Call it in the
    main thread.
    """
    for check in (_check_round_trip, _check_views_and_snapshots, _check_threads, _check_release_and_expiry):
        check(case)
    for with_peer in (
        (_check_other_process, _check_slow_reader, _check_stalled_reads, _check_killed_consumer),
        (_check_killed_producer,),
    ):
        peer = case.start_peer()
        try:
            for check_peer in with_peer:  # the last one kills it
                check_peer(case, peer)
        except BaseException:
            with contextlib.suppress(Exception):
                peer.kill()
            raise
    _check_restarted_owner(case)


def put_rows(backend: ShardBackend, value: int, rows: int = 64) -> list[TensorShardInfo]:
    """Two shards of recognisable content; run by a peer."""
    return backend.put([_content(value, rows), _content(value + 1, rows)])


def read_sum(backend: ShardBackend, shard: TensorShardInfo) -> int:
    """The sum of a shard's elements; run by a peer."""
    return int(ShardRegistry(backend).fetch([RTensor(shard)], timeout_s=60)[0].sum())


def hold(backend: ShardBackend, shard: TensorShardInfo) -> int:
    """Fetch a shard, in place where that can be, and keep it for the life of the process; run by a peer."""
    (tensor,) = backend.fetch([ShardRead(shard)], timeout_s=60)
    _HELD.append(tensor)
    return int(tensor.sum())


def sum_of_held(backend: ShardBackend) -> int:  # noqa: ARG001
    """The sum of what `hold` keeps; run by a peer."""
    return int(_HELD[-1].sum())


def read_until_killed(backend: ShardBackend, shards: Sequence[TensorShardInfo]) -> NoReturn:
    """Read for ever; run by a peer."""
    while True:
        backend.fetch([ShardRead(shard) for shard in shards], timeout_s=60)


def put_until_killed(backend: ShardBackend, step: int) -> NoReturn:
    """Put and release for ever; run by a peer."""
    while True:
        backend.release(backend.put([_content(91, 512), _content(92)], step=step))


_HELD: list[torch.Tensor] = []


@contextlib.contextmanager
def cancelled_after(seconds: float) -> Iterator[None]:
    """Raise `KeyboardInterrupt` in this thread, the main one, wherever it is then."""

    def cancel(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    timer = threading.Timer(seconds, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1])
    before = signal.signal(signal.SIGUSR1, cancel)
    try:
        timer.start()
        yield
    finally:
        try:
            timer.cancel()
            timer.join()
            signal.pthread_sigmask(signal.SIG_BLOCK, ())  # A system call: a signal under way comes now.
        finally:
            signal.signal(signal.SIGUSR1, before)


def _content(value: int, rows: int = 64) -> torch.Tensor:
    return torch.full((rows, 1024), value, dtype=torch.int64)


def _read(case: BackendCase, *shards: TensorShardInfo) -> list[torch.Tensor]:
    return ShardRegistry(case.backend).fetch([RTensor(shard) for shard in shards], timeout_s=60)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


@contextlib.contextmanager
def _expected(kind: type[BaseException], otherwise: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(otherwise)


def _wait_for(condition: Callable[[], bool], otherwise: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        _expect(time.monotonic() < deadline, otherwise)
        time.sleep(0.02)


def _expect_lost(
    case: BackendCase, shard: TensorShardInfo, what: str, kind: type[ShardError] = ShardError
) -> None:
    try:
        _read(case, shard)
    except kind as error:
        for name in (shard.shard_id, shard.owner, shard.node_id):
            _expect(name in str(error), f"the error names shard, owner or node other than {name}: {error}")
        _expect(error.shard_id == shard.shard_id, f"the error carries another shard: {error.shard_id}")
        return
    raise AssertionError(what)


def _check_round_trip(case: BackendCase) -> None:
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    tensors = [
        torch.tensor(3, dtype=torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor([True, False, True]),
        base.T,
        base[1::2, ::3],
        torch.randn(300, 700).to(torch.bfloat16),
        torch.randint(0, 255, (1 << 20,), dtype=torch.uint8),
        torch.randn(5, dtype=torch.complex64),
    ]
    for got, want in zip(_read(case, *case.backend.put(tensors)), tensors, strict=True):
        _expect(got.dtype == want.dtype and got.shape == want.shape, f"{want.dtype}{list(want.shape)}")
        _expect(torch.equal(got, want), f"other bytes for {want.dtype}{list(want.shape)}")
    _expect(case.backend.put([]) == [] and case.backend.fetch([]) == [], "nothing in, nothing out")


def _check_views_and_snapshots(case: BackendCase) -> None:
    source = torch.arange(1000 * 64).reshape(1000, 64)
    (shard,) = case.backend.put([source])
    want = source.clone()
    source.fill_(-1)
    handle = RTensor(shard)
    registry = ShardRegistry(case.backend)
    wanted = [handle, handle, handle[[7, 3, 999, 3]], handle[10:20, 5:9]]
    whole, twin, rows, block = registry.fetch(wanted, timeout_s=60)
    _expect(torch.equal(whole, want), "a write to the source after put shows")
    _expect(torch.equal(rows, want[[7, 3, 999, 3]]) and torch.equal(block, want[10:20, 5:9]), "a view")
    whole.fill_(5)
    _expect(torch.equal(twin, want), "a write shows in another result of the same call")
    _expect(torch.equal(_read(case, shard)[0], want), "a write shows in a later read")


def _check_threads(case: BackendCase) -> None:
    def work(value: int) -> bool:
        shards = put_rows(case.backend, value)
        return all(torch.equal(got, _content(value + i)) for i, got in enumerate(_read(case, *shards)))

    with ThreadPoolExecutor(4) as pool:
        _expect(all(pool.map(work, range(12))), "threads disturb each other")


def _check_other_process(case: BackendCase, peer: Peer) -> None:
    mine = put_rows(case.backend, 3)
    _expect(peer.call(read_sum, mine[1]) == 4 * 64 * 1024, "a peer reads other bytes")
    theirs = peer.call(put_rows, 11)
    _expect(torch.equal(_read(case, theirs[0])[0], _content(11)), "a peer's shard has other bytes")
    case.backend.release([*mine, *theirs])


def _check_slow_reader(case: BackendCase, peer: Peer) -> None:
    shards = put_rows(case.backend, 21, rows=512)
    (here,) = case.backend.fetch([ShardRead(shards[0])], timeout_s=60)
    peer.call(hold, shards[1])
    case.backend.release(shards)
    for value in range(8):
        case.backend.release(put_rows(case.backend, 1000 + value, rows=512))
    _expect(torch.equal(here, _content(21, 512)), "memory was reused under a reader in this process")
    _expect(peer.call(sum_of_held) == 22 * 512 * 1024, "memory was reused under a reader elsewhere")
    if case.is_released:
        _expect_lost(case, shards[0], "a stale handle is answered with other bytes", StaleHandleError)


def _check_stalled_reads(case: BackendCase, peer: Peer) -> None:
    if case.stall is None:
        return
    shards = peer.call(put_rows, 31)
    with case.stall(peer, shards) as stalled:
        reads = [ShardRead(shard) for shard in stalled]
        for _ in range(2):
            with _expected(TransportTimeoutError, "a read that nobody answers went past its deadline"):
                case.backend.fetch(reads, timeout_s=0.3)
        with _expected(KeyboardInterrupt, "a read can't be cancelled"), cancelled_after(0.3):
            case.backend.fetch(reads, timeout_s=60)
    for shard, value in zip(shards, (31, 32), strict=True):
        _expect(torch.equal(_read(case, shard)[0], _content(value)), "a cancelled read disturbs later ones")
    case.backend.release(shards)


def _check_killed_consumer(case: BackendCase, peer: Peer) -> None:
    shards = put_rows(case.backend, 41, rows=512)
    peer.call(hold, shards[0])
    _kill_during(case, peer, shards[0], read_until_killed, shards)
    _expect(torch.equal(_read(case, shards[1])[0], _content(42, 512)), "a consumer took a shard with it")
    case.backend.release(shards)
    _expect(case.backend.stats().leases == 0, "a killed consumer, or a cancelled read, still holds a lease")


def _check_killed_producer(case: BackendCase, peer: Peer) -> None:
    before = case.backend.stats()
    shards = peer.call(put_rows, 51)
    mine = put_rows(case.backend, 53)
    _kill_during(case, peer, mine[0], put_until_killed, 9)
    if case.outlives_producer:
        _expect(torch.equal(_read(case, shards[0])[0], _content(51)), "a shard died with its producer")
    else:
        try:
            _, got = _read(case, mine[1], shards[0])
        except ShardLostError as error:
            _expect(shards[0].shard_id in str(error), f"the error does not name the shard: {error}")
            _expect(shards[0].owner in (error.owner, ""), f"the error does not name the owner: {error}")
            _expect(shards[0].node_id in (error.node_id, ""), f"the error does not name the node: {error}")
        else:
            _expect(torch.equal(got, _content(51)), "a shard of a dead producer has other bytes")
    if not case.is_released:
        return
    case.backend.release([*shards, *mine])
    _expect_lost(case, shards[0], "a released shard of a dead producer is read", StaleHandleError)

    def nothing_is_left() -> bool:
        case.backend.expire(10)
        now = case.backend.stats()
        return (now.shards, now.held_bytes) == (before.shards, before.held_bytes)

    _wait_for(nothing_is_left, "what a producer was putting when it was killed is left behind")


def _kill_during(
    case: BackendCase, peer: Peer, shard: TensorShardInfo, fn: Callable[..., Any], *args: Any
) -> None:
    """Kill a peer in the midst of something, while this process reads."""
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(peer.call, fn, *args)
        for _ in range(50):
            _read(case, shard)
        _expect(not doing.done(), f"the peer ended by itself: {doing.done() and doing.exception()!r}")
        peer.kill()
        _expect(doing.exception(timeout=60) is not None, "the peer was not killed")


def _check_release_and_expiry(case: BackendCase) -> None:
    if not case.is_released:
        return
    before = case.backend.stats()
    shards = case.backend.put([_content(61), _content(62)], step=7)
    during = case.backend.stats()
    _expect(during.shards - before.shards == 2, "stats() does not count shards")
    _expect(during.held_bytes - before.held_bytes == 2 * 64 * 1024 * 8, "stats() does not count bytes")
    case.backend.release(shards[:1])
    case.backend.release(shards[:1])
    _expect_lost(case, shards[0], "a released shard is read", StaleHandleError)
    _expect(torch.equal(_read(case, shards[1])[0], _content(62)), "a release took another shard along")
    case.backend.expire(7)
    _expect(case.backend.stats().shards == before.shards + 1, "a lease ended early")
    _expect(case.backend.expire(8) >= 1, "a lease did not end")
    _expect_lost(case, shards[1], "an expired shard is read", StaleHandleError)
    after = case.backend.stats()
    _expect(after.shards == before.shards and after.held_bytes == before.held_bytes, "something leaks")


def _check_restarted_owner(case: BackendCase) -> None:
    if case.restart_owner is None:
        return
    old = put_rows(case.backend, 71)
    case.restart_owner()
    new = put_rows(case.backend, 81)
    _expect_lost(case, old[0], "a restarted owner answers an old handle", StaleHandleError)
    _expect(torch.equal(_read(case, new[0])[0], _content(81)), "a restarted owner does not work")
