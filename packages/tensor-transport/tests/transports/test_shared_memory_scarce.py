"""Pulls out of shared memory where descriptors or address space are few, or others spoil what is used."""

import errno
import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from forking import in_a_child

from raycrew.tensor_transport._bytes import ArenaMaps, ArenaReader
from raycrew.tensor_transport._bytes.shared import own_files
from raycrew.tensor_transport.errors import StaleHandleError, TransportError
from raycrew.tensor_transport.transports import SharedMemoryTransport

pytestmark = pytest.mark.hostile

MIB = 1 << 20
COUNT = 20


@pytest.fixture
def offers(pair):
    """Each in an arena of its own."""
    return [pair[0].offer(np.full(MIB, value, np.uint8), folded=True) for value in range(COUNT)]


def pulled(transport, offer):
    into = np.zeros(offer.size_bytes, np.uint8)
    transport.pull([offer.whole], [into]).wait(60)
    return set(into.tolist())


def path_of(offer):
    return Path(offer.key.folder, f"raycrew-{offer.key.spot.arena}")


def descriptors(path=None):
    """Those of this process, or those of one file."""
    found = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return [fd for fd in found if path is None or os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]


@contextmanager
def opened(path):
    """An arena under a lease, and the lease's descriptor."""
    before = set(descriptors(path))
    with ArenaReader(path, ArenaMaps(), heed=bool) as arena:
        (lease,) = set(descriptors(path)) - before
        yield arena, lease


@contextmanager
def descriptors_left(count, *, low=True):
    """Take all but some, of the lowest numbers or of the highest; nobody else may take any."""
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError as error:
        assert error.errno == errno.EMFILE
    left = held[:count] if low else held[len(held) - count :]
    try:
        for fd in left:
            os.close(fd)
        yield
    finally:
        for fd in set(held).difference(left):
            os.close(fd)


def test_mappings_that_are_kept_take_no_descriptors(pair, offers):
    before = len(descriptors())
    assert [pulled(pair[1], offer) for offer in offers] == [{value} for value in range(COUNT)]
    assert len(descriptors()) == before


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("left", [1, 2, 3, 10])
def test_whoever_can_open_one_file_can_pull_and_map(pair, offers, left, low):
    def child():
        most = max(descriptors()) + 64  # Whatever else of this process has some.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with descriptors_left(left, low=low):
            found = [pulled(pair[1], offer) for offer in offers]
            before = len(descriptors())
            views = [pair[1].map(offer) for offer in offers]
            seen = [set(view.tolist()) for view in views]
            assert not any(view.flags.writeable for view in views)
            assert low or len(descriptors()) == before
        return found == seen == [{value} for value in range(COUNT)]

    assert in_a_child(child)


def test_memory_that_is_removed_under_the_last_lease_goes_with_few_descriptors_too(pair, offers):
    reader = pair[1]

    def child():
        view = reader.map(offers[0])
        pulled(reader, offers[0])
        with descriptors_left(0):
            path_of(offers[0]).unlink()
            del view
        return str(path_of(offers[0])) not in Path("/proc/self/maps").read_text()

    assert in_a_child(child)


def test_what_can_not_be_mapped_is_read(folder, pair, offers):
    def child():
        maps = ArenaMaps()
        with ArenaReader(path_of(offers[0]), maps, heed=bool) as arena:
            arena.prepare(MIB)
        into = np.zeros(MIB, np.uint8)
        used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        for value in range(1, COUNT):
            with ArenaReader(path_of(offers[value]), maps, heed=bool) as arena:
                arena.prepare(MIB)
                arena.read(into, offers[value].key.spot.offset)
                arena.confirm()
            if set(into.tolist()) != {value}:
                return False
        return len(maps) <= 1

    assert in_a_child(child)


@pytest.mark.parametrize("size", [0, 4096, MIB])
def test_a_file_that_is_cut_short_is_an_error_and_no_signal(pair, offers, size):
    def child():
        reader, offer = pair[1], offers[1]
        assert pulled(reader, offer) == {1}
        with ArenaReader(path_of(offer), ArenaMaps(), heed=bool) as arena:
            arena.prepare(MIB)
            os.truncate(path_of(offer), size)
            for act in (lambda: arena.read(np.zeros(MIB, np.uint8), 0), arena.confirm):
                with pytest.raises(OSError, match="cut short"):
                    act()
        for act in (lambda: pulled(reader, offer), lambda: reader.map(offer)):
            with pytest.raises(StaleHandleError):
                act()
        return pulled(reader, offers[2]) == {2}

    assert in_a_child(child)


def test_a_descriptor_that_is_closed_and_another_files_by_now_is_an_error(pair, offers):
    with opened(path_of(offers[3])) as (arena, lease), tempfile.TemporaryFile() as other:
        other.write(bytes(2 * MIB))
        other.flush()
        os.dup2(other.fileno(), lease)
        for act in (lambda: arena.read(np.zeros(MIB, np.uint8), 0), arena.confirm):
            with pytest.raises(OSError, match="descriptor closed"):
                act()
        arena.close()
        assert os.fstat(lease).st_size == 2 * MIB
        os.close(lease)


def test_an_arena_that_lost_its_lease_and_is_used_anew_is_an_error(pair):
    owner = pair[0]
    offer = owner.offer(np.full(MIB, 1, np.uint8))
    with opened(path_of(offer)) as (arena, lease):
        arena.prepare(MIB)
        again = os.open(path_of(offer), os.O_RDWR)
        os.dup2(again, lease)
        os.close(again)
        owner.withdraw([offer])
        owner.offer(np.full(MIB, 2, np.uint8))
        with pytest.raises(OSError, match="used anew while it was read"):
            arena.confirm()


def test_a_lease_ends_without_harm_to_a_file_that_has_its_number(pair, offers):
    reader = pair[1]
    before = set(descriptors(path_of(offers[4])))
    view = reader.map(offers[4])
    (lease,) = set(descriptors(path_of(offers[4]))) - before
    with tempfile.TemporaryFile() as other:
        other.write(bytes(2 * MIB))
        other.flush()
        os.dup2(other.fileno(), lease)
        del view
        assert os.fstat(lease).st_size == 2 * MIB
        os.close(lease)


@pytest.mark.parametrize("closed", ["closed", "another file's"])
def test_a_view_keeps_its_lease_whoever_closes_its_descriptor(pair, closed):
    """As programs do that close all descriptors which they don't know."""
    owner, reader = pair
    offer = owner.offer(np.full(MIB, 1, np.uint8))
    before = set(descriptors(path_of(offer)))
    view = reader.map(offer)
    (lease,) = set(descriptors(path_of(offer))) - before
    with tempfile.TemporaryFile() as other:
        os.close(lease) if closed == "closed" else os.dup2(other.fileno(), lease)
        owner.withdraw([offer])
        later = owner.offer(np.full(MIB, 2, np.uint8))
        assert set(view.tolist()) == {1} and later.key.spot.arena != offer.key.spot.arena
        del view
        owner.withdraw([later])
        found = {owner.offer(np.full(MIB, 3, np.uint8)).key.spot.arena for _ in range(2)}
        assert found == {offer.key.spot.arena, later.key.spot.arena}, "the lease went with the view"
        if closed != "closed":
            os.close(lease)


@pytest.mark.parametrize("closed", ["closed", "another file's"])
def test_an_owner_whose_descriptor_somebody_closed_uses_no_memory_anew_that_is_read(pair, closed):
    owner, reader = pair
    offer = owner.offer(np.full(MIB, 1, np.uint8))
    own = descriptors(path_of(offer))
    view = reader.map(offer)
    with tempfile.TemporaryFile() as other:
        for fd in own:
            os.close(fd) if closed == "closed" else os.dup2(other.fileno(), fd)
        owner.withdraw([offer])
        later = owner.offer(np.full(MIB, 2, np.uint8))
        assert set(view.tolist()) == {1} and pulled(reader, later) == {2}
        owner.close()
        if closed != "closed":
            for fd in own:
                os.close(fd)  # Its number is another file's still.


def test_a_session_goes_on_whoever_closes_the_descriptors_of_its_locks(folder, pair):
    owner, reader = pair
    offer = owner.offer(np.full(MIB, 1, np.uint8))
    own = Path(offer.key.folder)
    locks = [fd for path in own.iterdir() if path.suffix for fd in descriptors(path)]
    assert len(locks) == 3, "two sessions, and an owner in one of them"
    for fd in locks:
        os.close(fd)
    SharedMemoryTransport(directory=folder).close()  # It removes what is left of sessions that are over.
    assert pulled(reader, offer) == {1}
    owner.close()
    reader.close()
    assert not list(own.iterdir())


@pytest.mark.parametrize("size", [0, 4096, MIB])
def test_an_owner_whose_memory_somebody_cut_takes_other_memory(pair, size):
    def child():
        owner, reader = pair
        offer = owner.offer(np.full(1000, 1, np.uint8))
        os.truncate(path_of(offer), size)
        later = owner.offer(np.full(1000, 2, np.uint8))
        owner.withdraw([offer])
        with pytest.raises(StaleHandleError):
            pulled(reader, offer)
        found = pulled(reader, later)
        owner.close()
        return found == {2} and later.key.spot.arena != offer.key.spot.arena

    assert in_a_child(child)


def test_an_owner_has_one_descriptor_for_an_arena(pair, offers):
    assert [len(descriptors(path_of(offer))) for offer in offers] == [1] * COUNT


def test_a_lock_for_which_there_is_no_room_is_given_up(folder, monkeypatch):
    def refuse(fd):
        raise OSError(errno.ENOMEM, "no room")

    before = len(descriptors())
    with monkeypatch.context() as patch, pytest.raises(TransportError, match="no room"):
        patch.setattr(own_files, "hold_open", refuse)
        SharedMemoryTransport(directory=folder)
    assert len(descriptors()) == before


def test_no_descriptor_at_all_is_an_error_by_name(pair, offers):
    def child():
        with descriptors_left(0), pytest.raises(TransportError, match="Too many open files"):
            pulled(pair[1], offers[0])
        return pulled(pair[1], offers[0]) == {0}

    assert in_a_child(child)
