import fcntl
import os
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from forking import in_a_child
from processes import MakingPeer

from raycrew.tensor_transport._bytes import ArenaMaps, ArenaReader
from raycrew.tensor_transport.errors import (
    StaleHandleError,
    TransferCancelledError,
    TransportClosedError,
    TransportError,
)
from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import SharedMemoryTransport


@pytest.mark.hostile
@pytest.mark.slow
def test_conformance():
    check_transport(PullCase(SharedMemoryTransport, lambda: MakingPeer(SharedMemoryTransport)))


class InSession:
    """Makes a transport in a session of a name, in whatever process."""

    def __init__(self):
        self._session = uuid.uuid4().hex

    def __call__(self):
        return SharedMemoryTransport(self._session)


@pytest.mark.hostile
@pytest.mark.slow
def test_conformance_within_one_session_where_bytes_survive_their_owner():
    make = InSession()
    with make() as made:
        assert made.capabilities.survives_owner
    check_transport(PullCase(make, lambda: MakingPeer(make)))


def test_what_is_written_into_reserved_memory_is_what_is_offered():
    with SharedMemoryTransport(arena_bytes=1 << 16) as owner, SharedMemoryTransport() as reader:
        reserved = [owner.reserve(size) for size in (100, 1 << 16, 7)]
        between = owner.offer(np.full(50, 9, np.uint8))
        for number, (_, room) in enumerate(reserved):
            room[:] = number
        for number, (offer, room) in enumerate(reserved):
            assert reader.map(offer).tolist() == [number] * room.size
        assert reader.map(between).tolist() == [9] * 50
        owner.withdraw([offer for offer, _ in reserved])
        with pytest.raises(StaleHandleError):
            reader.map(reserved[0][0])
    with pytest.raises(TransportClosedError):
        owner.reserve(1)


def test_reserved_memory_counts_until_it_is_withdrawn():
    with SharedMemoryTransport(arena_bytes=1 << 16, max_bytes=1 << 16) as owner:
        for _ in range(5):
            offer, _ = owner.reserve(40_000)
            with pytest.raises(TransportError, match="max_bytes"):
                owner.reserve(40_000)
            owner.withdraw([offer])


MIB = 1 << 20


def pulled(transport, offer):
    into = np.zeros(offer.size_bytes, np.uint8)
    transport.pull([offer.whole], [into]).wait(60)
    return set(into.tolist())


def filled(value):
    return np.full(MIB, value, np.uint8)


def mappings(folder):
    """The mappings of this process for reading alone, of what lies in a folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f" {folder}/" in line and " r--s " in line]


class Arenas:
    """The files of the arenas in a folder, kept open: their memory is seen after their end, too."""

    def __init__(self, folder):
        self._open = [path.open("rb") for path in Path(folder).rglob("*") if path.stat().st_size > MIB]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self._open:
            file.close()

    @property
    def full(self):
        """How many of them take more memory than their header."""
        return sum(512 * os.fstat(file.fileno()).st_blocks > MIB for file in self._open)


def test_an_arena_is_mapped_once_and_never_read_as_what_was_in_it_before(folder, pair):
    owner, reader = pair
    for value in range(1, 5):
        offer = owner.offer(filled(value))
        assert pulled(reader, offer) == {value} == set(reader.map(offer).tolist())
        assert len(mappings(folder)) == 1
        owner.withdraw([offer])
        with pytest.raises(StaleHandleError, match="it was released"):
            pulled(reader, offer)
        other = owner.offer(filled(100))
        with pytest.raises(StaleHandleError, match="released and used again"):
            pulled(reader, offer)
        owner.withdraw([other])


def test_memory_that_is_given_back_is_gone_whoever_has_it_mapped(folder, pair):
    owner, reader = pair
    offers = [owner.offer(filled(value)) for value in (1, 2)]
    assert [pulled(reader, offer) for offer in offers] == [{1}, {2}]
    with Arenas(folder) as arenas:
        view = reader.map(offers[1])
        assert arenas.full == 2
        owner.withdraw(offers)
        owner.close()
        assert arenas.full == 1 and set(view.tolist()) == {2}
        with pytest.raises(StaleHandleError, match="its memory was given back"):
            pulled(reader, offers[1])
        assert set(view.tolist()) == {2}
        del view
        assert arenas.full == 0


def test_memory_of_a_dead_session_is_gone_when_the_next_one_begins(folder):
    with SharedMemoryTransport(directory=folder) as reader:
        peer = MakingPeer(Owner(folder))
        offer = peer.call(offer_filled, 3)
        assert pulled(reader, offer) == {3}
        with Arenas(folder) as arenas:
            peer.kill()
            assert arenas.full == 1
            SharedMemoryTransport(directory=folder).close()
            assert arenas.full == 0


class Owner:
    """Makes a transport in a folder, in another process."""

    def __init__(self, folder):
        self._folder = folder

    def __call__(self):
        return SharedMemoryTransport(arena_bytes=MIB, directory=self._folder)


def offer_filled(transport, value):
    return transport.offer(filled(value))


def test_who_writes_to_reserved_memory_may_go_on_after_the_end(folder):
    with SharedMemoryTransport(arena_bytes=MIB, directory=folder) as owner:
        offer, room = owner.reserve(MIB)
        owner.withdraw([offer])
    room[:] = 1
    assert not list(Path(folder).rglob("*-*-*-*")) and set(room.tolist()) == {1}


def test_a_closed_reader_keeps_no_mapping_but_those_of_views(folder, pair):
    owner, reader = pair
    offers = [owner.offer(filled(value)) for value in (1, 2)]
    for offer in offers:
        pulled(reader, offer)
    view = reader.map(offers[0])[5:9]
    assert len(mappings(folder)) == 2
    reader.close()
    assert len(mappings(folder)) == 1 and view.tolist() == [1] * 4
    del view
    assert not mappings(folder)


def test_a_forked_child_drops_the_mappings_and_leaves_the_leases(folder, pair):
    owner, reader = pair
    lent, pulled_too = owner.offer(filled(1)), owner.offer(filled(2))
    assert pulled(reader, pulled_too) == {2}
    view = reader.map(lent)
    held = [view]

    def child():
        found = len(mappings(folder)), pulled(reader, pulled_too), set(held[0].tolist())
        held.clear()
        return found == (1, {2}, {1})

    assert in_a_child(child)
    owner.withdraw([lent])
    owner.offer(filled(3))
    assert set(view.tolist()) == {1}


def test_no_more_mappings_are_kept_than_said(folder):
    with SharedMemoryTransport(arena_bytes=MIB, directory=folder) as owner:
        maps = ArenaMaps(most=2)
        offers = [owner.offer(filled(value)) for value in range(4)]
        paths = [Path(folder, f"raycrew-{os.geteuid()}", f"raycrew-{o.key.spot.arena}") for o in offers]
        for path in paths[:3] + paths[1:2] + paths[3:]:
            with ArenaReader(path, maps, heed=bool) as arena:
                arena.prepare(MIB)
        kept = [line.split()[-1] for line in mappings(folder)]
        assert len(maps) == 2 and sorted(kept) == sorted(map(str, (paths[1], paths[3])))


@pytest.mark.hostile
def test_an_owner_that_stands_still_over_its_memory_holds_up_neither_cancel_nor_close():
    """As where it is stopped while it uses an arena anew."""
    reader = SharedMemoryTransport()
    with SharedMemoryTransport() as owner:
        offer = owner.offer(torch.arange(10))
        into = torch.zeros(10, dtype=torch.int64)
        with Path(offer.key.folder, f"raycrew-{offer.key.spot.arena}").open("rb") as arena:
            fcntl.flock(arena, fcntl.LOCK_EX)
            cancelled, closed = (reader.pull([offer.whole], [into]) for _ in range(2))
            cancelled.cancel()
            assert type(cancelled.exception(30)) is TransferCancelledError
            reader.close()
            assert type(closed.exception(30)) is TransportClosedError
        owner.pull([offer.whole], [into]).wait(30)
        assert into.tolist() == list(range(10))
