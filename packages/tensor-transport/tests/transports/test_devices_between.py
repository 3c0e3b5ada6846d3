"""What needs a GPU or a library: the suite where there is one, a reason by name where there is none."""

import sys
import threading

import pytest
import torch
from processes import MakingPeer

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import fold_in_sections
from raycrew.tensor_transport.errors import (
    DamagedBytesError,
    TransferCancelledError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import CudaIpcTransport, NixlTransport, Offer, this_process


@pytest.mark.gpu
@pytest.mark.hostile
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_conformance_of_cuda_ipc():
    check_transport(PullCase(CudaIpcTransport, lambda: MakingPeer(CudaIpcTransport)))


@pytest.mark.gpu
def test_device_to_device_starts_after_the_streams_of_both_sides():
    with CudaIpcTransport() as transport:
        peer = MakingPeer(CudaIpcTransport)
        try:
            offer = peer.call(_offer_busy)
            into = torch.zeros(1 << 24, device="cuda")
            transport.pull([offer.whole], [into], timeout_s=60).wait()
            assert bool((into == 7).all())
        finally:
            peer.kill()


@pytest.mark.gpu
def test_device_memory_arrives_on_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with CudaIpcTransport() as transport:
        peer = MakingPeer(CudaIpcTransport)
        try:
            offer = peer.call(_offer_busy)
            into = torch.zeros(1 << 24, device="cuda:1")
            transport.pull([offer.whole], [into], timeout_s=60).wait()
            assert bool((into == 7).all())
        finally:
            peer.kill()


def _offer_busy(transport):
    tensor = torch.zeros(1 << 24, device="cuda")
    for _ in range(7):
        tensor += 1
    return transport.offer(tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_missing_device_is_a_reason():
    with CudaIpcTransport() as transport:
        assert "CUDA" in transport.available()
        with pytest.raises(TransportError, match=r"cuda_ipc can't be used here: .*CUDA"):
            transport.offer(torch.arange(5))


def test_a_missing_library_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with NixlTransport() as transport:
        assert transport.available() == "NIXL is not installed: install nixl"
        with pytest.raises(TransportError, match="nixl can't be used here: NIXL is not installed"):
            transport.offer(torch.arange(5))
    with pytest.raises(TransportError, match="NIXL is not installed"):
        NixlTransport(pool_bytes=1 << 20)


class _Ref:
    """Stands for Ray's reference of an object."""

    def __init__(self, name):
        self.name = name

    def hex(self):
        return self.name


@pytest.mark.hostile
def test_a_get_by_nixl_that_does_not_end_keeps_nobody_else_waiting(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def get(ref, into, timeout_s):
        if ref.name == "hangs":
            begun.set()
            go_on.wait(60)
        return torch.full((4,), 7, dtype=torch.uint8)

    monkeypatch.setattr(_ray, "get_by_nixl", get)
    hangs, other = (Offer("nixl", this_process(), _Ref(name), 4) for name in ("hangs", "other"))
    buffers = [torch.zeros(4, dtype=torch.uint8) for _ in range(4)]
    with NixlTransport() as transport:
        hanging = transport.pull([hangs.whole], [buffers[0]])
        assert begun.wait(60)
        transport.pull([other.whole], [buffers[1]], timeout_s=30).wait()
        with pytest.raises(TransportTimeoutError):
            transport.pull([hangs.whole], [buffers[2]], timeout_s=0.01).wait()
        waiting = transport.pull([hangs.whole], [buffers[3]])
        waiting.cancel()
        with pytest.raises(TransferCancelledError):
            waiting.wait(30)
        go_on.set()
        hanging.wait()
    assert [buffer.sum().item() for buffer in buffers] == [28, 28, 0, 0]


@pytest.mark.hostile
def test_what_nixl_writes_in_place_is_compared_with_its_fold(monkeypatch):
    asked = []

    def get(ref, into, timeout_s):
        asked.append(into)
        return into.fill_(7)

    monkeypatch.setattr(_ray, "get_by_nixl", get)
    fold = fold_in_sections(torch.full((4,), 7, dtype=torch.uint8))
    into = torch.zeros(4, dtype=torch.uint8)
    right, wrong = (Offer("nixl", this_process(), _Ref("x"), 4, each) for each in (fold, fold ^ 1))
    with NixlTransport() as transport:
        transport.pull([right.whole], [into]).wait(30)
        assert into.tolist() == [7] * 4 and asked[0].data_ptr() == into.data_ptr(), "no copy on the way"
        with pytest.raises(DamagedBytesError):
            transport.pull([wrong.whole], [into]).wait(30)
