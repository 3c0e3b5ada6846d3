import contextlib
import fcntl
import gc
import pickle

import pytest
import torch
from processes import ProcessPeer

from raycrew.tensor_transport import RTensor, ShardLostError, ShardRegistry, StaleHandleError, TransportError
from raycrew.tensor_transport._bytes.shared.own_files import PREFIX
from raycrew.tensor_transport.backends.shared_memory import SharedMemoryBackend
from raycrew.tensor_transport.errors import TransportClosedError
from raycrew.tensor_transport.protocols import ShardBackend
from raycrew.tensor_transport.testing import BackendCase, check_shard_backend, hold, put_rows, sum_of_held


@pytest.fixture
def backend():
    found = SharedMemoryBackend(arena_bytes=8 << 20)
    yield found
    found.close()


def files(backend):
    return sorted(path.name for path in backend._arenas.folder.glob(f"{PREFIX}{backend.session}*"))


def read(backend, *shards):
    return ShardRegistry(backend).fetch([RTensor(shard) for shard in shards])


def test_conforms(backend):
    assert isinstance(backend, ShardBackend)

    @contextlib.contextmanager
    def stall(_peer, shards):
        """As an owner that was stopped while it was about to use the arena anew."""
        with (backend._arenas.folder / f"{PREFIX}{shards[0].locator[0]}").open("rb") as arena:
            fcntl.flock(arena, fcntl.LOCK_EX)
            yield shards

    check_shard_backend(BackendCase(backend, lambda: ProcessPeer(backend), True, True, stall=stall))


@pytest.mark.smoke
def test_large_reads_are_in_place_and_private(backend):
    source = torch.arange(1 << 20)
    (shard,) = backend.put([source])
    a, b = read(backend, shard)[0], read(backend, shard)[0]
    a[:10] = -1
    assert torch.equal(b, source) and torch.equal(read(backend, shard)[0], source)
    assert a[11] == 11


def test_a_write_hides_nothing_that_is_put_beside_it_later(backend):
    first, later = torch.zeros((1 << 18) + 3), torch.arange(1 << 18, dtype=torch.float32)
    (mine,) = read(backend, *backend.put([first]))
    mine.fill_(-1)  # its last page is a copy from now on, with what lay behind it
    (shard,) = backend.put([later])
    (beside,) = read(backend, shard)
    assert torch.equal(beside, later)
    beside.fill_(-2)
    assert torch.equal(read(backend, shard)[0], later) and mine.unique().tolist() == [-1]


def test_what_was_there_when_an_arena_was_mapped_is_read_through_one_mapping(backend):
    shards = backend.put([torch.full((1 << 18,), float(i)) for i in range(3)])
    kept = [read(backend, shard)[0] for shard in shards]
    starts = [tensor.data_ptr() for tensor in kept]
    assert [start - starts[0] for start in starts] == [0, 1 << 20, 2 << 20]


def test_an_arena_is_reused_only_without_shards_and_readers(backend):
    size = torch.zeros(1 << 20)
    (first,) = backend.put([size])
    reader = read(backend, first)[0]
    backend.release([first])
    backend._arenas._current = None
    (second,) = backend.put([size + 1])
    assert second.locator[0] != first.locator[0], "somebody reads the first arena"
    assert backend.stats().leases == 1
    assert torch.equal(reader, size)
    del reader
    gc.collect()
    assert backend.stats().leases == 0
    backend._arenas._current = None
    (third,) = backend.put([size + 2])
    assert third.locator[0] == first.locator[0] and third.locator[1] == first.locator[1] + 1
    with pytest.raises(StaleHandleError, match="released and used again"):
        read(backend, first)
    assert torch.equal(read(backend, third)[0], size + 2)


def test_memory_stays_flat_over_many_steps(backend):
    for step in range(40):
        shards = backend.put([torch.full((1 << 18,), step), torch.full((1 << 17,), step)], step=step)
        got = read(backend, *shards)
        assert all(bool((tensor == step).all()) for tensor in got)
        del got
        backend.expire(step + 1)
    stats = backend.stats()
    assert (stats.shards, stats.held_bytes) == (0, 0)
    assert stats.reserved_bytes <= 2 * (8 << 20)


def test_limits_are_named(backend):
    small = SharedMemoryBackend(arena_bytes=1 << 20, max_bytes=2 << 20)
    small.put([torch.zeros(1 << 18)])
    before = small.stats().shards
    with pytest.raises(TransportError, match="max_bytes=2097152"):
        small.put([torch.zeros(10), torch.zeros(1 << 19)])
    assert small.stats().shards == before, "all or none"
    small.close()
    with pytest.raises(TransportClosedError):
        small.put([torch.zeros(3)])
    with pytest.raises(ValueError, match="at least 4096"):
        SharedMemoryBackend(arena_bytes=3)
    with pytest.raises(ValueError, match="letters and digits"):
        SharedMemoryBackend("a-b")


def test_another_machine_is_named(backend):
    (shard,) = backend.put([torch.zeros(3)])
    elsewhere = pickle.loads(pickle.dumps(shard))
    object.__setattr__(elsewhere, "node_id", "other")
    with pytest.raises(ShardLostError, match="another machine"):
        read(backend, elsewhere)


def test_closing_the_last_backend_leaves_no_file():
    backend = SharedMemoryBackend()
    backend.put([torch.zeros(100)])
    assert len(files(backend)) == 3
    backend.close()
    backend.close()
    assert files(backend) == []


def test_shards_of_a_dead_producer_go_with_their_release(backend):
    peer = ProcessPeer(backend)
    shards = peer.call(put_rows, 5)
    peer.kill()
    assert read(backend, shards[0])[0][0, 0] == 5
    held = backend.stats()
    backend.release(shards)
    assert held.shards == 2 and backend.stats().shards == 0
    assert backend.stats().reserved_bytes == 0, "its file is gone"


def test_a_killed_session_is_swept_by_the_next_backend():
    lonely = SharedMemoryBackend()
    session = lonely.session
    peer = ProcessPeer(lonely)
    peer.call(put_rows, 5)
    directory = lonely._arenas.folder
    lonely.close()
    assert list(directory.glob(f"{PREFIX}{session}*")), "a process of the session is left"
    peer.kill()
    SharedMemoryBackend().close()
    assert not list(directory.glob(f"{PREFIX}{session}*"))


def test_a_reader_keeps_its_bytes_when_the_session_ends():
    owner = SharedMemoryBackend()
    shards = put_rows(owner, 9, rows=512)
    peer = ProcessPeer(owner)
    peer.call(hold, shards[0])
    owner.close()
    assert peer.call(sum_of_held) == 9 * 512 * 1024
    peer.kill()


def test_files_are_for_their_user_alone(backend):
    backend.put([torch.zeros(3)])
    for name in files(backend):
        assert ((backend._arenas.folder / name).stat().st_mode & 0o077) == 0
