"""An owner and a reader of shared memory, in a folder of their own."""

import pytest

from raycrew.tensor_transport.transports import SharedMemoryTransport

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def pair(folder):
    with (
        SharedMemoryTransport(arena_bytes=MIB, directory=folder) as owner,
        SharedMemoryTransport(directory=folder) as reader,
    ):
        yield owner, reader
