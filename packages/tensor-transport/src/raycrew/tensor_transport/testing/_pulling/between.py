"""What a pulling transport promises between two processes that live."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport.errors import StaleHandleError, TransportError
from raycrew.tensor_transport.testing._conformance import Peer
from raycrew.tensor_transport.testing._pulling.peers import (
    TWO_BUCKETS,
    expect_gone_or_right,
    offer_large,
    offer_samples,
    offer_tiny,
    pull,
    there,
    unwatch_memory,
    watch_memory,
    withdraw,
)
from raycrew.tensor_transport.testing._transports import (
    OVERSIZED_BYTES,
    bits_of,
    bounded_memory,
    expect,
    expected,
    large_tensor,
    samples,
    tiny_tensors,
)
from raycrew.tensor_transport.transports import PullTransport, Region

_MIB = 1 << 20
_WAIT_S = 120.0


def check_samples(transport: PullTransport, peer: Peer) -> None:
    want = list(samples().values())
    offers = peer.call(offer_samples)
    into = [there(transport, bits_of(tensor) * 0).view(tensor.dtype) for tensor in want]
    transport.pull([offer.whole for offer in offers], into, timeout_s=_WAIT_S).wait()
    for name, got, tensor in zip(samples(), into, want, strict=True):
        expect(torch.equal(bits_of(got), bits_of(tensor)), f"other bytes for {name}")


def check_tiny(transport: PullTransport, peer: Peer) -> None:
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


def check_regions(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 0, 8 * 1000)
    into = torch.full((12,), -1)
    transport.pull(
        [Region(offer, 8 * 990, 40), Region(offer, 0, 24), Region(offer, 8 * 992, 16), Region(offer, 80, 0)],
        [into[0:5], into[5:8], into[9:11], into[12:]],
    ).wait(_WAIT_S)
    want = [990, 991, 992, 993, 994, 0, 1, 2, -1, 992, 993, -1]
    expect(into.tolist() == want, f"regions are in other places: {into.tolist()}")


def check_oversized(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 3)
    into = torch.zeros(OVERSIZED_BYTES // 8, dtype=torch.int64)
    peer.call(watch_memory)
    with bounded_memory(TWO_BUCKETS, "a pull into memory that is there"):
        transport.pull([offer.whole], [into]).wait(_WAIT_S)
    peer.call(unwatch_memory)
    expect(torch.equal(into, large_tensor(3)), "an oversized tensor has other bytes")
    peer.call(withdraw, [offer])


def check_threads(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in range(8)]

    def work(i: int) -> bool:
        return torch.equal(pull(transport, offers[i % 8]), large_tensor(i % 8, _MIB))

    with ThreadPoolExecutor(8) as pool:
        expect(all(pool.map(work, range(32))), "threads disturb each other")


def check_awaiting(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in range(3)]

    async def several() -> bool:
        into = [torch.zeros(_MIB // 8, dtype=torch.int64) for _ in offers]
        pulls = [transport.pull([o.whole], [b]) for o, b in zip(offers, into, strict=True)]
        await asyncio.gather(*(_ended(transfer) for transfer in pulls))
        return all(torch.equal(got, large_tensor(value, _MIB)) for value, got in enumerate(into))

    expect(asyncio.run(several()), "awaited transfers have other bytes")


def check_withdrawing(transport: PullTransport, peer: Peer) -> None:
    offers = [peer.call(offer_large, value, _MIB) for value in (10, 11)]
    peer.call(withdraw, offers[:1])
    later = [peer.call(offer_large, value, _MIB) for value in (12, 13, 14)]
    expect_gone_or_right(transport, offers[0], 10, StaleHandleError)
    for offer, value in zip([offers[1], *later], (11, 12, 13, 14), strict=True):
        expect(
            torch.equal(pull(transport, offer), large_tensor(value, _MIB)), "a withdrawal took others along"
        )


def check_mapping(transport: PullTransport, peer: Peer) -> None:
    offer = peer.call(offer_large, 16, _MIB)
    if not transport.capabilities.maps:
        with expected(TransportError, otherwise="something that does not map mapped something"):
            transport.map(offer)
        return
    mapped = transport.map(offer, timeout_s=60)
    expect(not mapped.flags.writeable, "mapped bytes can be written to")
    peer.call(withdraw, [offer])
    for value in range(6):
        peer.call(withdraw, [peer.call(offer_large, value, _MIB)])
    expect(bool((mapped.view(np.int64) == large_tensor(16, _MIB).numpy()).all()), "mapped bytes were reused")


async def _ended(transfer: Any) -> None:
    await transfer
