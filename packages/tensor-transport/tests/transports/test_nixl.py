"""The suite over NIXL, where it is installed: it needs no GPU."""

import importlib.util

import pytest
import torch
from actors import ActorPeer, Remade

from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import NixlTransport


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
@pytest.mark.long
@pytest.mark.hostile
@pytest.mark.slow
def test_conformance(ray_cluster):
    NixlTransport().offer(torch.arange(5))
    check_transport(PullCase(NixlTransport, lambda: ActorPeer(Remade(NixlTransport))))
