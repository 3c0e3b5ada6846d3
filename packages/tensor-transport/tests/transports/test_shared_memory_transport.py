import pytest
from processes import MakingPeer

from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import SharedMemoryTransport


@pytest.mark.hostile
@pytest.mark.slow
def test_conformance():
    check_transport(PullCase(SharedMemoryTransport, lambda: MakingPeer(SharedMemoryTransport)))
