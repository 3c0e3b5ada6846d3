"""Most of the suite over NIXL, where it is installed: it needs no GPU."""

import contextlib
import functools
import importlib.util

import pytest
import torch
from actors import ActorPeer, Remade

from raycrew.tensor_transport.testing import PullCase
from raycrew.tensor_transport.testing._pulling import between
from raycrew.tensor_transport.testing._pulling.case import _check_alone
from raycrew.tensor_transport.transports import NixlTransport


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
@pytest.mark.long
@pytest.mark.hostile
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_conformance_but_for_owners_that_stand_still(ray_cluster, device):
    """A pull without a deadline from an owner that is stopped can't be cancelled: Ray waits for it."""
    make = functools.partial(NixlTransport, device=device)
    make().offer(torch.arange(5))
    case = PullCase(make, lambda: ActorPeer(Remade(make)))
    _check_alone(case)
    peer = case.start_peer()
    with contextlib.closing(make()) as transport, contextlib.ExitStack() as ended:
        ended.callback(peer.kill)
        for check in (
            between.check_samples,
            between.check_tiny,
            between.check_regions,
            between.check_oversized,
            between.check_threads,
        ):
            check(transport, peer)
