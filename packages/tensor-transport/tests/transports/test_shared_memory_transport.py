import numpy as np
import pytest
from processes import MakingPeer

from raycrew.tensor_transport.errors import StaleHandleError, TransportClosedError, TransportError
from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import SharedMemoryTransport


@pytest.mark.hostile
@pytest.mark.slow
def test_conformance():
    check_transport(PullCase(SharedMemoryTransport, lambda: MakingPeer(SharedMemoryTransport)))


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
