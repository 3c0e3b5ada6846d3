"""What a peer runs while a pulling transport is checked, and a pull of what it offers."""

import contextlib
from collections.abc import Sequence
from typing import NoReturn

import torch

from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.testing._transports import (
    OVERSIZED_BYTES,
    bounded_memory,
    expect,
    large_tensor,
    samples,
    tiny_tensors,
)
from raycrew.tensor_transport.transports import Offer, PullTransport

_MIB = 1 << 20
_WAIT_S = 120.0
TWO_BUCKETS = 32 * _MIB
_watched = contextlib.ExitStack()


def offer_samples(transport: PullTransport) -> list[Offer]:
    """Run by a peer."""
    return [transport.offer(there(transport, tensor), folded=True) for tensor in samples().values()]


def offer_tiny(transport: PullTransport) -> tuple[Offer, list[Offer]]:
    """All tiny tensors as one offer, and some of them each as its own; run by a peer."""
    tiny = tiny_tensors()
    together = transport.offer(there(transport, torch.cat(tiny)))
    return together, [transport.offer(there(transport, tensor)) for tensor in tiny[:200]]


def offer_large(transport: PullTransport, value: int, size_bytes: int = OVERSIZED_BYTES) -> Offer:
    """Run by a peer."""
    return transport.offer(there(transport, large_tensor(value, size_bytes)), folded=value % 2 == 1)


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


def watch_memory(_: PullTransport) -> None:
    """Run by a peer whose bytes are going to be pulled."""
    _watched.enter_context(bounded_memory(TWO_BUCKETS, "being pulled from"))


def unwatch_memory(_: PullTransport) -> None:
    """Run by a peer once they are; raises where that took more memory than two buckets."""
    _watched.close()


def pull(transport: PullTransport, offer: Offer, timeout_s: float | None = None) -> torch.Tensor:
    """All bytes of an offer, as words."""
    into = torch.zeros(offer.size_bytes, dtype=torch.uint8)
    transport.pull([offer.whole], [into], timeout_s=timeout_s).wait(_WAIT_S)
    return into.view(torch.int64)


def there(transport: PullTransport, tensor: torch.Tensor) -> torch.Tensor:
    """On the device that the transport is made for first of all."""
    return tensor.to(transport.capabilities.devices[0])


def expect_gone_or_right(
    transport: PullTransport, offer: Offer, value: int, kind: type[TransportError]
) -> None:
    try:
        got = pull(transport, offer, timeout_s=60)
    except kind as error:
        owner = getattr(error, "owner", "")
        expect(owner == str(offer.owner), f"the error names another owner: {owner!r}")
        return
    expect(torch.equal(got, large_tensor(value, offer.size_bytes)), "an offer that is gone gives other bytes")
