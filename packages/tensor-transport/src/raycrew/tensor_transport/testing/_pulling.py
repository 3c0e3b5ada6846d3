"""What every `PullTransport` promises."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from raycrew.tensor_transport.errors import (
    DamagedBytesError,
    ShardError,
    StaleHandleError,
    TransferCancelledError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UnsupportedTensorError,
)
from raycrew.tensor_transport.testing._conformance import Peer
from raycrew.tensor_transport.testing._transports import (
    OVERSIZED_BYTES,
    bits_of,
    bounded_memory,
    expect,
    expected,
    large_tensor,
    nothing_left,
    process_id,
    samples,
    tiny_tensors,
)
from raycrew.tensor_transport.transports import Buffer, Offer, PullTransport, Region

_MIB = 1 << 20
_TWO_BUCKETS = 32 * _MIB
_WAIT_S = 120.0


@dataclass(frozen=True)
class PullCase:
    """A pulling transport under test.

    Attributes:
        make: Makes one in this process.
        start_peer: Starts another process that has one of the same kind.
    """

    make: Callable[[], PullTransport]
    start_peer: Callable[[], Peer]

    def checks(self) -> Sequence[Callable[[], None]]:
        """See `TransportCase.checks`."""
        return [lambda: _check_alone(self), lambda: _check_with_peer(self), lambda: _check_deaths(self)]


def offer_samples(transport: PullTransport) -> list[Offer]:
    """Run by a peer."""
    return [transport.offer(_there(transport, tensor), folded=True) for tensor in samples().values()]


def offer_tiny(transport: PullTransport) -> tuple[Offer, list[Offer]]:
    """All tiny tensors as one offer, and some of them each as its own; run by a peer."""
    tiny = tiny_tensors()
    together = transport.offer(_there(transport, torch.cat(tiny)))
    return together, [transport.offer(_there(transport, tensor)) for tensor in tiny[:200]]


def offer_large(transport: PullTransport, value: int, size_bytes: int = OVERSIZED_BYTES) -> Offer:
    """Run by a peer."""
    return transport.offer(_there(transport, large_tensor(value, size_bytes)), folded=value % 2 == 1)


def withdraw(transport: PullTransport, offers: Sequence[Offer]) -> None:
    """Run by a peer."""
    transport.withdraw(offers)
    transport.withdraw(offers)


def close(transport: PullTransport) -> None:
    """Run by a peer."""
    transport.close()
    transport.close()


def offer_for_ever(transport: PullTransport) -> NoReturn:
    """Run by a peer that is going to be killed."""
    while True:
        transport.withdraw([transport.offer(large_tensor(5, _MIB))])


def pull(transport: PullTransport, offer: Offer, timeout_s: float | None = None) -> torch.Tensor:
    """All bytes of an offer, as words."""
    into = torch.zeros(offer.size_bytes, dtype=torch.uint8)
    transport.pull([offer.whole], [into], timeout_s=timeout_s).wait(_WAIT_S)
    return into.view(torch.int64)


def _check_alone(case: PullCase) -> None:
    case.make().close()
    with nothing_left():
        transport = case.make()
        with contextlib.closing(transport):
            expect(transport.available() is None, f"{transport.name} is not available here")
            for check in (_check_own_offers, _check_refusals, _check_folds, _check_closing):
                check(case, transport)


def _check_with_peer(case: PullCase) -> None:
    with _peer(case) as peer, contextlib.closing(case.make()) as transport:
        for check in (
            _check_samples,
            _check_tiny,
            _check_regions,
            _check_oversized,
            _check_threads,
            _check_stopped_peer,
            _check_cancelling,
            _check_awaiting,
            _check_withdrawing,
            _check_mapping,
            _check_closed_owner,
        ):
            check(transport, peer)


def _check_deaths(case: PullCase) -> None:
    with contextlib.closing(case.make()) as transport:
        peer = case.start_peer()
        try:
            _check_killed(transport, peer)
        except BaseException:
            with contextlib.suppress(Exception):
                peer.kill()
            raise
        mine = transport.offer(torch.arange(8))
        expect(torch.equal(pull(transport, mine), torch.arange(8)), "a dead peer disturbs others")


def _check_own_offers(case: PullCase, transport: PullTransport) -> None:
    source = torch.arange(1000)
    offer = transport.offer(source)
    expect(offer.transport == transport.name and offer.size_bytes == 8000, "an offer tells what it is")
    if transport.capabilities.keeps_copy:
        source.fill_(-1)
    expect(torch.equal(pull(transport, offer), torch.arange(1000)), "other bytes of an own offer")
    array = np.arange(100, dtype=np.uint8)
    into = np.zeros(100, np.uint8)
    transport.pull([transport.offer(array).whole], [into]).wait(_WAIT_S)
    expect(bool((into == array).all()), "other bytes of an array")
    transport.pull([], []).wait(_WAIT_S)
    with expected(UnsupportedTensorError, otherwise="a sparse tensor was offered"):
        transport.offer(torch.eye(3).to_sparse())
    other = case.make()
    with contextlib.closing(other):
        expect(
            torch.equal(pull(other, offer), torch.arange(1000)), "another transport here reads other bytes"
        )


def _check_refusals(_: PullCase, transport: PullTransport) -> None:
    offer = transport.offer(torch.arange(100))
    foreign = dataclasses.replace(offer, transport="carrier_pigeon")
    good, read_only = torch.full((100,), -3), np.zeros(800, np.uint8)
    read_only.flags.writeable = False
    wrong_requests: list[tuple[list[Region], list[Buffer]]] = [
        ([offer.whole], []),
        ([foreign.whole], [good]),
        ([Region(offer, 8, 800)], [good]),
        ([Region(offer, -8, 8)], [good[:1]]),
        ([Region(offer, 0, 792)], [good]),
        ([offer.whole], [torch.zeros(100, 2, dtype=torch.int64)[:, 0]]),
        ([offer.whole], [read_only]),
        ([offer.whole], [np.zeros((10, 80), np.uint8)]),
    ]
    for regions, into in wrong_requests:
        with expected(ValueError, otherwise=f"{regions} into {into} was not refused"):
            transport.pull(regions, into)
    expect(bool((good == -3).all()), "a refused request wrote something")
    for wrong in (
        dataclasses.replace(offer, size_bytes=8000),
        dataclasses.replace(offer, owner=dataclasses.replace(offer.owner, started=1, pid=2**22 - 1)),
    ):
        into_wrong = torch.full((wrong.size_bytes // 8,), -3)
        try:
            transport.pull([wrong.whole], [into_wrong], timeout_s=30).wait(_WAIT_S)
        except TransportError:
            continue
        same = wrong.size_bytes == offer.size_bytes and torch.equal(into_wrong, torch.arange(100))
        expect(same, "a wrongly described offer gives other bytes")


def _check_folds(_: PullCase, transport: PullTransport) -> None:
    source = _there(transport, large_tensor(9, 3 * _MIB + 8))
    offer = transport.offer(source, folded=True)
    expect(offer.fold is not None, "an offer has no fold")
    expect(
        torch.equal(pull(transport, offer), large_tensor(9, 3 * _MIB + 8)), "other bytes of a folded offer"
    )
    wrong = dataclasses.replace(offer, fold=(offer.fold or 0) ^ 1)
    with expected(DamagedBytesError, otherwise="damaged bytes are not seen"):
        pull(transport, wrong)
    part = torch.zeros(2, dtype=torch.int64)
    transport.pull([Region(wrong, 8, 16)], [part]).wait(_WAIT_S)
    expect(part.tolist() == [10, 11], "a part of a folded offer has other bytes")
    if not transport.capabilities.keeps_copy:
        source[200_000] += 1
        with expected(DamagedBytesError, otherwise="a write to lent bytes is not seen"):
            pull(transport, offer)


def _check_closing(case: PullCase, transport: PullTransport) -> None:
    offer = transport.offer(large_tensor(2))
    closed = case.make()
    into = torch.zeros(OVERSIZED_BYTES // 8, dtype=torch.int64)
    transfers = [closed.pull([offer.whole], [into]) for _ in range(4)]
    closed.close()
    closed.close()
    expect(all(transfer.done() for transfer in transfers), "a closed transport goes on writing")
    errors = [transfer.exception() for transfer in transfers]
    expect(
        all(error is None or isinstance(error, TransportClosedError) for error in errors),
        f"transfers of a closed transport ended otherwise: {errors}",
    )
    for use in (lambda: closed.pull([], []), lambda: closed.offer(into[:1]), lambda: closed.map(offer)):
        with expected(TransportClosedError, TransportError, otherwise="a closed transport is used"):
            use()
    expect(torch.equal(pull(transport, offer), large_tensor(2)), "closing one disturbs another")


def _check_samples(transport: PullTransport, peer: Peer) -> None:
    want = list(samples().values())
    offers = peer.call(offer_samples)
    into = [_there(transport, bits_of(tensor) * 0).view(tensor.dtype) for tensor in want]
    transport.pull([offer.whole for offer in offers], into, timeout_s=_WAIT_S).wait()
    for name, got, tensor in zip(samples(), into, want, strict=True):
        expect(torch.equal(bits_of(got), bits_of(tensor)), f"other bytes for {name}")


def _check_tiny(transport: PullTransport, peer: Peer) -> None:
    tiny = tiny_tensors()
    together, apart = peer.call(offer_tiny)
    ends = np.cumsum([tensor.nbytes for tensor in tiny]).tolist()
    regions = [
        Region(together, end - tensor.nbytes, tensor.nbytes) for end, tensor in zip(ends, tiny, strict=True)
    ]
    regions += [offer.whole for offer in apart]
    want = tiny + tiny[: len(apart)]
    order = torch.randperm(len(want)).tolist()
    into = [torch.zeros_like(want[i]) for i in order]
    transport.pull([regions[i] for i in order], into).wait(_WAIT_S)
    right = all(torch.equal(got, want[i]) for got, i in zip(into, order, strict=True))
    expect(right, "tiny tensors arrive mixed up")


def _check_regions(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 0, 8 * 1000)
    into = torch.full((12,), -1)
    transport.pull(
        [Region(offer, 8 * 990, 40), Region(offer, 0, 24), Region(offer, 8 * 992, 16), Region(offer, 80, 0)],
        [into[0:5], into[5:8], into[9:11], into[12:]],
    ).wait(_WAIT_S)
    want = [990, 991, 992, 993, 994, 0, 1, 2, -1, 992, 993, -1]
    expect(into.tolist() == want, f"regions are in other places: {into.tolist()}")


def _check_oversized(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 3)
    into = torch.zeros(OVERSIZED_BYTES // 8, dtype=torch.int64)
    with bounded_memory(_TWO_BUCKETS, "a pull into memory that is there"):
        transport.pull([offer.whole], [into]).wait(_WAIT_S)
    expect(torch.equal(into, large_tensor(3)), "an oversized tensor has other bytes")
    peer.call(withdraw, [offer])


def _check_threads(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in range(8)]

    def work(i: int) -> bool:
        return torch.equal(pull(transport, offers[i % 8]), large_tensor(i % 8, _MIB))

    with ThreadPoolExecutor(8) as pool:
        expect(all(pool.map(work, range(32))), "threads disturb each other")


def _check_stopped_peer(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 4, _MIB)
    with expected(TransportTimeoutError, otherwise="a deadline that has passed is not heeded"):
        pull(transport, offer, timeout_s=0)
    with _stopped(peer):
        if transport.capabilities.one_sided:
            expect(
                torch.equal(pull(transport, offer), large_tensor(4, _MIB)), "a stopped owner is waited for"
            )
            return
        if not _waits_for_owner(transport, offer, large_tensor(4, _MIB)):
            return
        transfer = transport.pull([offer.whole], [torch.zeros(_MIB, dtype=torch.uint8)])
        with expected(TransportTimeoutError, otherwise="a wait went past its own deadline"):
            transfer.wait(0.1)
        expect(transfer.cancel(), "a transfer that waits can't be cancelled")
        with expected(TransferCancelledError, otherwise="a cancelled transfer ended otherwise"):
            transfer.wait(_WAIT_S)
    expect(torch.equal(pull(transport, offer), large_tensor(4, _MIB)), "it does not recover from a stop")


def _waits_for_owner(transport: PullTransport, offer: Offer, wanted: torch.Tensor) -> bool:
    """Whether a stopped owner is waited for, up to the deadline; else its bytes were at hand, and right."""
    try:
        found = pull(transport, offer, timeout_s=0.3)
    except TransportTimeoutError:
        return True
    expect(torch.equal(found, wanted), "a stopped owner's bytes are wrong")
    return False


def _check_cancelling(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 6)
    into = torch.zeros(OVERSIZED_BYTES // 8, dtype=torch.int64)
    for _ in range(3):
        transfer = transport.pull([offer.whole], [into])
        transfer.cancel()
        error = transfer.exception(_WAIT_S)
        cancelled = isinstance(error, TransferCancelledError)
        expect(error is None or cancelled, f"a cancelled transfer ended with {error!r}")
        into.fill_(-1)
        pull(transport, peer.call(offer_large, 8, _MIB))
        expect(bool((into == -1).all()), "a transfer wrote after its end")
    transport.pull([offer.whole], [into]).wait(_WAIT_S)
    expect(torch.equal(into, large_tensor(6)), "a cancelled transfer disturbs later ones")
    peer.call(withdraw, [offer])


def _check_awaiting(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in range(3)]

    async def several() -> bool:
        into = [torch.zeros(_MIB // 8, dtype=torch.int64) for _ in offers]
        pulls = [transport.pull([o.whole], [b]) for o, b in zip(offers, into, strict=True)]
        await asyncio.gather(*(_ended(transfer) for transfer in pulls))
        return all(torch.equal(got, large_tensor(value, _MIB)) for value, got in enumerate(into))

    expect(asyncio.run(several()), "awaited transfers have other bytes")


def _check_withdrawing(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in (10, 11)]
    peer.call(withdraw, offers[:1])
    later = [peer.call(offer_large, value, _MIB) for value in (12, 13, 14)]
    _expect_gone_or_right(transport, offers[0], 10, StaleHandleError)
    for offer, value in zip([offers[1], *later], (11, 12, 13, 14), strict=True):
        expect(
            torch.equal(pull(transport, offer), large_tensor(value, _MIB)), "a withdrawal took others along"
        )


def _check_mapping(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 16, _MIB)
    if not transport.capabilities.maps:
        with expected(TransportError, otherwise="something that does not map mapped something"):
            transport.map(offer)
        return
    mapped = transport.map(offer)
    expect(not mapped.flags.writeable, "mapped bytes can be written to")
    peer.call(withdraw, [offer])
    for value in range(6):
        peer.call(withdraw, [peer.call(offer_large, value, _MIB)])
    expect(bool((mapped.view(np.int64) == large_tensor(16, _MIB).numpy()).all()), "mapped bytes were reused")


def _check_closed_owner(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 18, _MIB)
    peer.call(close)
    _expect_gone_or_right(transport, offer, 18, ShardError)


def _check_killed(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in (30, 31)]
    before = pull(transport, offers[0])
    mapped = transport.map(offers[1]) if transport.capabilities.maps else None
    with ThreadPoolExecutor(2) as pool:
        doing = pool.submit(peer.call, offer_for_ever)
        reading = pool.submit(_pull_until_gone, transport, offers)
        peer.kill()
        expect(doing.exception(_WAIT_S) is not None, "the peer was not killed")
        reading.result(_WAIT_S)
    expect(torch.equal(before, large_tensor(30, _MIB)), "what had arrived went with its owner")
    if mapped is not None:
        same = bool((mapped.view(np.int64) == large_tensor(31, _MIB).numpy()).all())
        expect(same, "mapped bytes went with their owner")
    for offer, value in zip(offers, (30, 31), strict=True):
        _expect_gone_or_right(transport, offer, value, ShardError)


def _pull_until_gone(transport: PullTransport, offers: Sequence[Offer]) -> None:
    for i in range(50):
        try:
            got = pull(transport, offers[i % 2], timeout_s=_WAIT_S)
        except ShardError:
            return
        expect(torch.equal(got, large_tensor(30 + i % 2, _MIB)), "a dying owner gives other bytes")


def _expect_gone_or_right(
    transport: PullTransport, offer: Offer, value: int, kind: type[TransportError]
) -> None:
    try:
        got = pull(transport, offer, timeout_s=60)
    except kind as error:
        owner = getattr(error, "owner", "")
        expect(owner == str(offer.owner), f"the error names another owner: {owner!r}")
        return
    expect(torch.equal(got, large_tensor(value, offer.size_bytes)), "an offer that is gone gives other bytes")


def _there(transport: PullTransport, tensor: torch.Tensor) -> torch.Tensor:
    """On the device that the transport is made for first of all."""
    return tensor.to(transport.capabilities.devices[0])


async def _ended(transfer: Any) -> None:
    await transfer


@contextlib.contextmanager
def _peer(case: PullCase) -> Iterator[Peer]:
    peer = case.start_peer()
    try:
        yield peer
    finally:
        peer.kill()


@contextlib.contextmanager
def _stopped(peer: Peer) -> Iterator[None]:
    pid = peer.call(process_id)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
