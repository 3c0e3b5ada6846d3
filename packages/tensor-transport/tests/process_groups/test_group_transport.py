"""The promises of a broadcast transport, kept by groups over gloo, and over NCCL where there is a GPU."""

import pytest
import torch
from group_members import Crew

from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.testing import BroadcastCase, take_device

PROMISES = [check.args[0].__name__.removeprefix("_check_") for check in BroadcastCase(list).checks()]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def crew(request):
    made = Crew(backend=request.param)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.timeout(150)  # Ranks that share a device wait for each other's turns on it.
@pytest.mark.parametrize("promise", PROMISES)
def test_groups_keep_each_promise_of_a_broadcast_transport(crew, promise):
    case = BroadcastCase(crew.join, "cuda" if crew.backend == "nccl" else "cpu")
    try:
        case.checks()[PROMISES.index(promise)]()
    except BaseException:
        crew.end()  # Its members may still be at it.
        raise


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_there_is_no_device_to_take():
    with pytest.raises(TransportError, match="sees no GPU"):
        take_device(0, 2, 1)
