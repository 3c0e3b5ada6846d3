"""What a pulling transport promises in one process: its own offers, refusals, folds, and its end."""

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from raycrew.tensor_transport.errors import (
    DamagedBytesError,
    TransportClosedError,
    TransportError,
    UnsupportedTensorError,
)
from raycrew.tensor_transport.testing._pulling.peers import pull, there
from raycrew.tensor_transport.testing._transports import OVERSIZED_BYTES, expect, expected, large_tensor
from raycrew.tensor_transport.transports import Buffer, PullTransport, Region

_MIB = 1 << 20
_WAIT_S = 120.0

Make = Callable[[], PullTransport]


def check_own_offers(make: Make, transport: PullTransport) -> None:
    source = torch.arange(1000)
    offer = transport.offer(source)
    expect(offer.transport == transport.name and offer.size_bytes == 8000, "an offer tells what it is")
    if transport.capabilities.keeps_copy:
        source.fill_(-1)
    expect(torch.equal(pull(transport, offer), torch.arange(1000)), "other bytes of an own offer")
    written = torch.zeros(1000, dtype=torch.int64)
    transport.pull([offer.whole], [written]).wait(_WAIT_S)
    expect(written._version > 0, "torch does not know that a tensor was written to")  # noqa: SLF001
    array = np.arange(100, dtype=np.uint8)
    into = np.zeros(100, np.uint8)
    transport.pull([transport.offer(array).whole], [into]).wait(_WAIT_S)
    expect(bool((into == array).all()), "other bytes of an array")
    transport.pull([], []).wait(_WAIT_S)
    with expected(UnsupportedTensorError, otherwise="a sparse tensor was offered"):
        transport.offer(torch.eye(3).to_sparse())
    other = make()
    with contextlib.closing(other):
        expect(
            torch.equal(pull(other, offer), torch.arange(1000)), "another transport here reads other bytes"
        )


def check_refusals(_: Make, transport: PullTransport) -> None:
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
        ([offer.whole], [torch.zeros(100, dtype=torch.complex64).conj()]),
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


def check_folds(_: Make, transport: PullTransport) -> None:
    source = there(transport, large_tensor(9, 3 * _MIB + 8))
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


def check_closing(make: Make, transport: PullTransport) -> None:
    offer = transport.offer(large_tensor(2))
    closed = make()
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
