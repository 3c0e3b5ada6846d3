"""The promises of a broadcast transport, kept by groups over gloo, and over NCCL where there is a GPU."""

import pytest
import torch
from group_members import Crew

from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.testing import BroadcastCase, check_transport, take_device


@pytest.mark.slow
@pytest.mark.hostile
def test_gloo_keeps_every_promise_of_a_broadcast_transport():
    crew = Crew()
    try:
        check_transport(BroadcastCase(crew.join))
    finally:
        crew.close()


@pytest.mark.gpu
@pytest.mark.hostile
@pytest.mark.timeout(1200)  # Ranks that share a device wait for each other's turns on it.
def test_nccl_keeps_every_promise_of_a_broadcast_transport():
    crew = Crew(backend="nccl")
    try:
        check_transport(BroadcastCase(crew.join, "cuda"))
    finally:
        crew.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_there_is_no_device_to_take():
    with pytest.raises(TransportError, match="sees no GPU"):
        take_device(0, 2, 1)
