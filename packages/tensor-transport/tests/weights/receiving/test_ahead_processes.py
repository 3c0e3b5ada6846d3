"""Buckets in the memory of another process, which is killed or stands still while something is made ready."""

import os
import signal

import pytest
import torch
from doubles import Generator, await_no_fetching
from models import assert_same
from processes import MakingPeer

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.transports import TcpTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher
from raycrew.tensor_transport.weights._update import as_store

pytestmark = pytest.mark.hostile
STATE = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(8)}


def there():
    return as_store(TcpTransport())


def put(store, data):
    return store.put(data)


def release(store, ticket):
    store.release(ticket)


class Far:
    """A store whose buckets are in another process."""

    def __init__(self, peer):
        self._peer = peer

    def put(self, data):
        return self._peer.call(put, data.copy())

    def release(self, ticket):
        self._peer.call(release, ticket)


@pytest.fixture
def peer():
    peer = MakingPeer(there)
    yield peer
    peer.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_what_is_held_stays_where_the_process_with_the_buckets_ends_or_stops(peer, how):
    """It happens when the first tensor is used: the others may have come by then."""
    with WeightDirectory.local() as directory, TcpTransport() as here:
        publisher = WeightPublisher(Far(peer), directory=directory, bucket_bytes=1 << 20)
        generator = Generator(here, directory)
        publisher.publish(STATE)
        generator.receiver.prepare(1)
        generator.receiver.apply(1)
        publisher.publish(STATE)
        generator.after = lambda n: None if n else os.kill(peer.process.pid, how)
        try:
            generator.receiver.prepare(2, timeout_s=2.0)
        except WeightUpdateError as error:
            assert error.intact and error.current_version == 1
        else:
            assert generator.given.keys() == STATE.keys()
        await_no_fetching()
        assert generator.receiver.intact and generator.receiver.version == 1
        assert_same(generator.model.tensors, STATE)
        if how == signal.SIGSTOP:
            os.kill(peer.process.pid, signal.SIGCONT)
            generator.after = lambda n: None
            generator.receiver.pull(timeout_s=60.0)
            assert generator.receiver.version == 2
