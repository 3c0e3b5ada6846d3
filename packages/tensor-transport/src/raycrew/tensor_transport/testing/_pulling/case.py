"""What every `PullTransport` promises, as a list of checks."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from raycrew.tensor_transport.testing._conformance import Peer
from raycrew.tensor_transport.testing._pulling.alone import (
    check_closing,
    check_folds,
    check_own_offers,
    check_refusals,
)
from raycrew.tensor_transport.testing._pulling.between import (
    check_awaiting,
    check_mapping,
    check_oversized,
    check_regions,
    check_samples,
    check_threads,
    check_tiny,
    check_withdrawing,
)
from raycrew.tensor_transport.testing._pulling.interrupted import (
    check_cancelling,
    check_closed_owner,
    check_killed,
    check_stopped_peer,
)
from raycrew.tensor_transport.testing._pulling.peers import pull
from raycrew.tensor_transport.testing._transports import expect, leaves_nothing
from raycrew.tensor_transport.transports import PullTransport


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


def _check_alone(case: PullCase) -> None:
    def use() -> None:
        with contextlib.closing(case.make()) as transport:
            expect(transport.available() is None, f"{transport.name} is not available here")
            for check in (check_own_offers, check_refusals, check_folds, check_closing):
                check(case.make, transport)

    case.make().close()
    leaves_nothing(use)


def _check_with_peer(case: PullCase) -> None:
    with _peer(case) as peer, contextlib.closing(case.make()) as transport:
        for check in (
            check_samples,
            check_tiny,
            check_regions,
            check_oversized,
            check_threads,
            check_stopped_peer,
            check_cancelling,
            check_awaiting,
            check_withdrawing,
            check_mapping,
            check_closed_owner,
        ):
            check(transport, peer)


def _check_deaths(case: PullCase, *, within_s: float = 60.0) -> None:
    def use() -> None:
        with contextlib.closing(case.make()) as transport:
            _check_death(case, transport)
        case.make().close()  # What the peer left behind goes when the next one begins.
        gc.collect()

    leaves_nothing(use, within_s=within_s)


def _check_death(case: PullCase, transport: PullTransport) -> None:
    peer = case.start_peer()
    try:
        check_killed(transport, peer)
    except BaseException:
        with contextlib.suppress(Exception):
            peer.kill()
        raise
    mine = transport.offer(torch.arange(8))
    expect(torch.equal(pull(transport, mine), torch.arange(8)), "a dead peer disturbs others")


@contextlib.contextmanager
def _peer(case: PullCase) -> Iterator[Peer]:
    peer = case.start_peer()
    try:
        yield peer
    finally:
        peer.kill()
