"""The promises of a broadcast transport, kept by groups over gloo, and over NCCL where there are GPUs."""

import pytest
import torch
from group_members import Crew

from raycrew.tensor_transport.testing import BroadcastCase, check_transport


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
def test_nccl_keeps_every_promise_of_a_broadcast_transport():
    if torch.cuda.device_count() < 3:
        pytest.skip("needs three GPUs")
    crew = Crew(backend="nccl")
    try:
        check_transport(BroadcastCase(crew.join, "cuda"))
    finally:
        crew.close()
