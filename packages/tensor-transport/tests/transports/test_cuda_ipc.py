"""What the transport over CUDA IPC does with a driver: the suite over a fake one, on any machine."""

import gc

import pytest
import torch
from fake_cuda import OnFakeDevice, faked
from processes import MakingPeer

from raycrew.tensor_transport.errors import StaleHandleError
from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports._choosing import no_process_vm

pytestmark = pytest.mark.skipif(no_process_vm() is not None, reason=str(no_process_vm()))


@pytest.mark.hostile
@pytest.mark.slow
def test_conformance_over_a_fake_driver():
    with faked():
        check_transport(PullCase(OnFakeDevice, lambda: MakingPeer(OnFakeDevice)))


def offer_and_drop(dropped):
    """Run by a peer: what it offered is not withdrawn, and the transport not closed."""
    offer = dropped.pop().offer(torch.arange(10))
    gc.collect()
    return offer


@pytest.mark.hostile
def test_what_a_transport_offered_goes_with_it():
    with faked(), OnFakeDevice() as transport:
        peer = MakingPeer(make_dropped)
        try:
            offer = peer.call(offer_and_drop)
            with pytest.raises(StaleHandleError, match="withdrawn"):
                transport.pull([offer.whole], [torch.zeros(10, dtype=torch.int64)], timeout_s=60).wait()
        finally:
            peer.kill()


def make_dropped():
    return [OnFakeDevice()]
