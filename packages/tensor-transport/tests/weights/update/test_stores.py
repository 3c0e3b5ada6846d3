"""Buckets in the shared memory of a node: one copy for all receivers, and none left behind."""

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import BucketFetchError, TransportError, UnsupportedTensorError
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.transports.process_vm import ProcessVmTransport
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport
from raycrew.tensor_transport.transports.tcp import TcpTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver, sync_weights
from raycrew.tensor_transport.weights._update import as_store
from raycrew.tensor_transport.weights._update.stores import TransportByteStore

FOLDER = Path("/dev/shm") / f"raycrew-{os.geteuid()}"


@pytest.fixture
def transport():
    with SharedMemoryTransport(arena_bytes=1 << 20) as transport:
        yield transport


class Calls:
    """A worker with these methods."""

    def __init__(self, **methods):
        vars(self).update(methods)


def reader():
    return SharedMemoryTransport()


def file_of(tensor):
    """The file whose mapping, for reading alone, a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *path = line.split()
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= tensor.data_ptr() < end:
            assert access == "r--s" and path, line
            return int(inode), path[0]
    raise AssertionError("it lies nowhere")


def test_receivers_of_a_node_map_the_same_bucket(transport):
    assert isinstance(transport, PullTransport)
    kept = {}
    state = weights() | {"large": torch.arange(1 << 18)}
    update = WeightPublisher(transport, bucket_bytes=1 << 20).publish(state)
    for name in "ab":
        with reader() as own:
            receiver = WeightReceiver(
                lambda tensors, name=name: kept.update({name: dict(tensors)}), store=own, borrow=True
            )
            receiver.apply(update)
    assert_same(kept["a"], state)
    assert_same(kept["b"], state)
    arenas = [bucket.ticket.key.spot.arena for bucket in update.buckets]
    for entry in update.tensors:
        if entry.size_bytes:
            (found,) = {file_of(kept[name][entry.name]) for name in "ab"}
            assert found[1].endswith(arenas[entry.bucket])


class Uncopied(SharedMemoryTransport):
    """Into which nothing is copied that was packed elsewhere."""

    def offer(self, data, *, folded=False):
        raise AssertionError


@pytest.mark.parametrize("with_directory", [False, True])
def test_buckets_are_packed_where_they_stay(with_directory):
    state = weights() | {"large": torch.arange(1 << 18), "empty": torch.zeros(0), "one": torch.ones(())}
    state["tied"] = state["large"]
    with Uncopied(arena_bytes=1 << 20) as transport, reader() as own, WeightDirectory.local() as directory:
        how = {"directory": directory if with_directory else None, "bucket_bytes": 1 << 20}
        publisher = WeightPublisher(transport, **how)
        for number in range(3):
            state["one"] = torch.tensor(float(number))
            model, update = Model(), publisher.publish(state)
            WeightReceiver(model.load, store=own).apply(update)
            assert_same(model.tensors, state)
        publisher.close()


@pytest.fixture
def one_thread():
    """As in workers that share a machine's cores: torch has no threads of its own then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.hostile
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_large_buckets_are_packed_by_several_threads_in_inference_mode_too(order, listed, one_thread):
    state = {name: torch.arange(1 << 20) for name in "abcd"}
    with SharedMemoryTransport() as transport, reader() as own:
        publisher = WeightPublisher(transport, bucket_bytes=32 << 20)
        for in_inference_mode in order:
            state["a"] = state["a"] + 1
            with torch.inference_mode(in_inference_mode):
                update = publisher.publish(state if listed else iter(state.items()))
            WeightReceiver((model := Model()).load, store=own).apply(update)
            assert_same(model.tensors, state)
        publisher.close()


def test_where_sizes_are_not_known_buckets_are_copied(transport):
    state = weights() | {"large": torch.arange(1 << 18)}
    with reader() as own:
        model, update = Model(), WeightPublisher(transport, bucket_bytes=1 << 20).publish(iter(state.items()))
        WeightReceiver(model.load, store=own).apply(update)
    assert_same(model.tensors, state)


@pytest.mark.hostile
@pytest.mark.parametrize("with_directory", [False, True])
def test_what_is_packed_for_a_version_that_fails_is_given_back(with_directory):
    """There is room for one version, and a second one at the same time."""
    state = {name: torch.full((1 << 17,), ord(name)) for name in "abcd"}
    spoilt = state | {"e": torch.zeros(3).to_sparse()}
    with (
        SharedMemoryTransport(arena_bytes=1 << 20, max_bytes=9 << 20) as transport,
        WeightDirectory.local() as directory,
    ):
        how = {"directory": directory if with_directory else None, "bucket_bytes": 1 << 20}
        publisher = WeightPublisher(transport, **how)
        for _ in range(6):
            publisher.publish(state)
            with pytest.raises(UnsupportedTensorError):
                publisher.publish(spoilt)
            with pytest.raises(TransportError, match="max_bytes"):
                publisher.publish(state | {str(n): torch.full((1 << 17,), n) for n in range(9)})
        publisher.close()


@pytest.mark.parametrize("borrow", [False, True])
def test_versions_that_nobody_needs_are_withdrawn_by_who_hears_of_it(transport, borrow):
    with WeightDirectory.local(keep=1) as directory, reader() as own:
        publisher = WeightPublisher(transport, directory=directory, bucket_bytes=1 << 20)
        model = Model()
        receiver = WeightReceiver(model.load, store=own, directory=directory, borrow=borrow)
        first = publisher.publish(weights(0))
        receiver.pull()
        for seed in range(1, 6):
            publisher.publish(weights(seed))
            receiver.pull()
        assert_same(model.tensors, weights(5))
        assert len(list(FOLDER.glob(f"*{first.buckets[0].ticket.key.spot.arena.split('-')[0]}*"))) < 8
        with pytest.raises(BucketFetchError, match="cannot be had"):
            WeightReceiver(model.load, store=own).apply(first)
        publisher.close()
        with pytest.raises(BucketFetchError):
            WeightReceiver(Model().load, store=own, directory=directory).pull()


@pytest.mark.hostile
@pytest.mark.parametrize("make", [SharedMemoryTransport, ProcessVmTransport, TcpTransport])
def test_what_is_not_needed_any_more_is_withdrawn_by_one_who_can(make):
    """The receiver's vote makes the version before superfluous, and it is the first to hear of that."""
    with WeightDirectory.local(keep=1) as directory, make() as trainers, make() as own:
        publisher = WeightPublisher(trainers, directory=directory)
        receiver = WeightReceiver(Model().load, store=own, directory=directory)
        updates = []

        def publish():
            updates.append(publisher.publish(weights(len(updates))))
            return updates[-1]

        trainer, generator = Calls(publish_weights=publish), Calls(apply_weights=receiver.apply)
        for _ in range(3):
            sync_weights(LocalPeers([trainer]), LocalPeers([generator]), directory=directory)
        for update in updates[:-2]:
            with pytest.raises(BucketFetchError, match="cannot be had"):
                WeightReceiver(Model().load, store=own).apply(update)
        WeightReceiver(Model().load, store=own).apply(updates[-1])
        publisher.close()
        for update in updates:
            with pytest.raises(BucketFetchError, match="cannot be had"):
                WeightReceiver(Model().load, store=own).apply(update)


@pytest.mark.hostile
def test_memory_that_is_not_let_go_of_ends_an_update_at_its_deadline(transport):
    """As where the process that has the memory is stopped while it uses it anew."""
    update = WeightPublisher(transport, bucket_bytes=1 << 20).publish(weights())
    key = update.buckets[0].ticket.key
    path = Path(key.folder) / f"raycrew-{key.spot.arena}"
    with reader() as own, path.open("rb") as arena:
        fcntl.flock(arena, fcntl.LOCK_EX)
        receiver = WeightReceiver(Model().load, store=own)
        with pytest.raises(BucketFetchError, match="was not let go of"):
            receiver.apply(update, timeout_s=0.05)
        assert receiver.intact
        fcntl.flock(arena, fcntl.LOCK_UN)
        receiver.apply(update)


def test_a_transport_that_does_not_map_is_pulled(transport):
    class Plain(SharedMemoryTransport):
        @property
        def capabilities(self):
            found = super().capabilities
            return type(found)(reach=found.reach, keeps_copy=True)

        def map(self, offer, *, timeout_s=None):
            raise AssertionError

    with Plain() as own:
        model = Model()
        WeightReceiver(model.load, store=own).apply(WeightPublisher(transport).publish(weights()))
    assert_same(model.tensors, weights())


def test_what_is_mapped_is_the_store_s_and_what_is_pulled_the_reader_s():
    with SharedMemoryTransport() as mapped, TcpTransport() as pulled:
        assert (as_store(mapped).gives_own_memory, as_store(pulled).gives_own_memory) == (False, True)


class Keeping:
    """A transport that only lends what it is offered, or has a copy."""

    def __init__(self, keeps_copy):
        self.capabilities = SimpleNamespace(maps=False, keeps_copy=keeps_copy, devices=("cpu",))
        self.offer = lambda data: data


@pytest.mark.hostile
@pytest.mark.parametrize("keeps_copy", [False, True])
def test_what_is_put_stays_as_it_was_when_its_memory_is_written_again(keeps_copy):
    bucket = torch.zeros(4, dtype=torch.uint8)
    offered = TransportByteStore(Keeping(keeps_copy)).put_tensor(bucket)
    bucket[:] = 7
    assert (offered is bucket) is keeps_copy, "one copy is enough"
    assert keeps_copy or offered.tolist() == [0] * 4


@pytest.mark.parametrize(("transport", "buckets"), [(SharedMemoryTransport, 1), (TcpTransport, 2)])
def test_buckets_are_larger_where_readers_have_them_in_place(transport, buckets):
    """A directory is told of each bucket, and each reader asks for it: that costs more than to map it."""
    state = {name: torch.zeros(3 << 20) for name in "ab"}
    with transport() as transport, WeightPublisher(transport) as publisher:
        assert len(publisher.publish(state).buckets) == buckets
    with pytest.raises(ValueError, match="bucket_bytes must be at least 64, got 0"):
        WeightPublisher(bucket_bytes=0)
