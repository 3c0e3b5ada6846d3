"""Marks of CUDA IPC: owners that go on, close or die within a pull, and others in a descriptor's place."""

import contextlib
import os
import tempfile

import pytest
import torch
from fake_cuda import OnFakeDevice, faked
from forking import in_a_child
from processes import MakingPeer

from raycrew.tensor_transport.errors import ShardLostError, StaleHandleError, TransportError
from raycrew.tensor_transport.transports import cuda_ipc
from raycrew.tensor_transport.transports._choosing import no_process_vm

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(no_process_vm() is not None, reason=str(no_process_vm())),
]


@pytest.fixture
def transport():
    with faked(), OnFakeDevice() as made:
        yield made


@pytest.fixture(scope="module")
def peer():
    made = MakingPeer(OnFakeDevice)
    yield made
    made.kill()


@pytest.fixture
def ending():
    """A peer that ends."""
    made = MakingPeer(OnFakeDevice)
    yield made
    made.kill()


@pytest.fixture
def within(transport, monkeypatch):
    """What happens within each pull, once the owner's memory is open."""
    happens, plain = [], cuda_ipc.cuda_driver.opened

    @contextlib.contextmanager
    def opened(*told):
        with plain(*told) as memory:
            for each in happens:
                each()
            yield memory

    monkeypatch.setattr(cuda_ipc.cuda_driver, "opened", opened)
    return happens


def offer_numbers(transport):
    return transport.offer(torch.arange(10))


def withdraw(transport, offer):
    transport.withdraw([offer])


def close(transport):
    transport.close()


def replace(transport, offer):
    transport.withdraw([offer])
    return transport.offer(torch.arange(10))  # It has the mark's place.


def pulled(transport, offer):
    into = torch.zeros(10, dtype=torch.int64)
    transport.pull([offer.whole], [into], timeout_s=60).wait()
    return into.tolist()


def test_a_pull_opens_the_memory_that_it_copies_and_nothing_else(transport, peer, within):
    opened = []
    within.append(lambda: opened.append(1))
    for _ in range(3):
        assert pulled(transport, peer.call(offer_numbers)) == list(range(10))
    assert len(opened) == 3


@pytest.mark.parametrize("end", [withdraw, replace])
def test_an_offer_that_is_withdrawn_within_a_pull_is_gone(transport, peer, within, end):
    offer = peer.call(offer_numbers)
    within.append(lambda: peer.call(end, offer))
    with pytest.raises(StaleHandleError, match="withdrawn"):
        pulled(transport, offer)


@pytest.mark.parametrize(("ends", "error"), [(False, StaleHandleError), (True, ShardLostError)])
def test_an_owner_that_closes_or_dies_within_a_pull_is_noticed(transport, ending, within, ends, error):
    offer = ending.call(offer_numbers)
    within.append(ending.kill if ends else lambda: ending.call(close))
    for _ in range(2):
        with pytest.raises(error):
            pulled(transport, offer)


def close_all(transport, offer):
    """Closes descriptors that it does not know, and has other files under their numbers; what is in these."""
    files = []
    os.close(offer.key.marks_fd)
    with tempfile.TemporaryDirectory() as folder:
        while not files or files[-1] < offer.key.marks_fd:
            files.append(os.open(f"{folder}/{len(files)}", os.O_RDWR | os.O_CREAT))
            os.write(files[-1], b"not a mark" * 9)
        transport.withdraw([offer])
        transport.close()
        return {os.pread(fd, 1000, 0) for fd in files}


def test_who_closes_what_is_not_his_spoils_no_file_and_makes_no_other_bytes(transport, ending, within):
    offer = ending.call(offer_numbers)
    found = []
    within.append(lambda: found.append(ending.call(close_all, offer)))
    for _ in range(2):
        with pytest.raises(StaleHandleError):
            pulled(transport, offer)
    assert found == [{b"not a mark" * 9}]


def offer_and_fork(transport):
    offers = [transport.offer(torch.arange(10)) for _ in range(2)]

    def child():
        transport.withdraw(offers)
        own = transport.offer(torch.arange(10))
        transport.close()
        return own.key.marks_name != offers[0].key.marks_name

    assert in_a_child(child)
    return offers


def test_a_forked_child_leaves_its_parents_marks_alone(transport, peer):
    for offer in peer.call(offer_and_fork):
        assert pulled(transport, offer) == list(range(10))


def test_where_no_mark_can_be_made_or_read_an_error_says_so(transport, peer, monkeypatch):
    offer = peer.call(offer_numbers)

    def full(*_):
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(TransportError, match=r"marks of offers: .*too many open files"):
        transport.offer(torch.arange(3))
    monkeypatch.setattr(cuda_ipc.marks, "reading", full)
    with pytest.raises(TransportError, match=r"the mark of 80 bytes offered by .*too many open files"):
        pulled(transport, offer)


def test_there_are_so_many_marks_and_each_is_used_again(transport, monkeypatch):
    offers = [transport.offer(torch.arange(3)) for _ in range(4096)]
    with pytest.raises(TransportError, match="more than 4096 offers"):
        transport.offer(torch.arange(3))
    transport.withdraw(offers[:7])
    assert len({transport.offer(torch.arange(3)).key.slot for _ in range(7)}) == 7
