"""What the transport over CUDA IPC does with a driver: the suite over a fake one, on any machine."""

import gc

import pytest
import torch
from fake_cuda import Mapping, OnFakeDevice, faked
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


def offer_some(transport):
    return [transport.offer(torch.full((10,), value)) for value in range(3)]


def test_marks_stay_mapped_and_bytes_do_not():
    peer = MakingPeer(OnFakeDevice)
    try:
        with faked(), OnFakeDevice() as transport:
            for value, offer in list(enumerate(peer.call(offer_some))) * 2:
                into = torch.zeros(10, dtype=torch.int64)
                transport.pull([offer.whole], [into], timeout_s=60).wait()
                assert into.tolist() == [value] * 10
            assert Mapping.mapped == list(transport._seen.values()) and len(Mapping.mapped) == 1
        assert not Mapping.mapped
    finally:
        peer.kill()


@pytest.mark.hostile
def test_marks_of_memory_that_was_freed_meanwhile_are_mapped_anew():
    peers = [MakingPeer(OnFakeDevice) for _ in range(2)]
    try:
        with faked(), OnFakeDevice() as transport:
            offer, other = (peer.call(offer_some)[1] for peer in peers)
            place = (offer.owner, offer.key.marks_handle, 0)
            transport._seen[place] = Mapping(other.key.handle, 0)
            into = torch.zeros(10, dtype=torch.int64)
            transport.pull([offer.whole], [into], timeout_s=60).wait()
            assert into.tolist() == [1] * 10 and len(Mapping.mapped) == 1
            peers[0].kill()
            transport.pull([other.whole], [into], timeout_s=60).wait()
            assert [at[0] for at in transport._seen] == [other.owner], "not those of who is dead"
        assert not Mapping.mapped
    finally:
        for peer in peers:
            peer.kill()
