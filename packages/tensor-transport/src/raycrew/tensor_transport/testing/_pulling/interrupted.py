"""What a pulling transport promises when a peer stops or dies, or a pull is cancelled."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from raycrew.tensor_transport.errors import ShardError, TransferCancelledError, TransportTimeoutError
from raycrew.tensor_transport.testing._conformance import Peer
from raycrew.tensor_transport.testing._pulling.peers import (
    close,
    expect_gone_or_right,
    offer_for_ever,
    offer_large,
    pull,
    withdraw,
)
from raycrew.tensor_transport.testing._transports import (
    OVERSIZED_BYTES,
    expect,
    expected,
    large_tensor,
    process_id,
)
from raycrew.tensor_transport.transports import Offer, PullTransport

_MIB = 1 << 20
_WAIT_S = 120.0


def check_stopped_peer(transport: PullTransport, peer: Peer) -> None:
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


def check_cancelling(transport: PullTransport, peer: Peer) -> None:
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


def check_closed_owner(transport: PullTransport, peer: Peer) -> None:
    """It closes while it is pulled from, and says so."""
    offers = [peer.call(offer_large, value, _MIB) for value in (30, 31)]
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(_pull_until_gone, transport, offers)
        peer.call(close)
        reading.result(_WAIT_S)
    for offer, value in zip(offers, (30, 31), strict=True):
        expect_gone_or_right(transport, offer, value, ShardError)


def check_killed(transport: PullTransport, peer: Peer) -> None:
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
        if transport.capabilities.survives_owner:
            _expect_survival(transport, offer, value)
        else:
            expect_gone_or_right(transport, offer, value, ShardError)


def _expect_survival(transport: PullTransport, offer: Offer, value: int) -> None:
    try:
        found = pull(transport, offer)
    except ShardError as error:
        raise AssertionError("what is to survive its owner is gone") from error
    expect(torch.equal(found, large_tensor(value, _MIB)), "what survives its owner has other bytes")


def _pull_until_gone(transport: PullTransport, offers: Sequence[Offer]) -> None:
    for i in range(50):
        try:
            got = pull(transport, offers[i % 2], timeout_s=_WAIT_S)
        except ShardError:
            return
        expect(torch.equal(got, large_tensor(30 + i % 2, _MIB)), "a dying owner gives other bytes")


@contextlib.contextmanager
def _stopped(peer: Peer) -> Iterator[None]:
    pid = peer.call(process_id)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
