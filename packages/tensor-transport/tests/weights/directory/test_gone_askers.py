"""Who hangs up while it waits for an answer of a directory: nothing begins for it any more."""

import sys

import pytest
import torch
from test_local_socket import TIMEOUT_S, Interrupt, serving

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory import local_socket
from raycrew.tensor_transport.weights._directory.actor import DirectoryActor
from raycrew.tensor_transport.weights._directory.local_socket import LocalClient

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

MODEL = {f"layers.{i}": torch.full((64,), float(i)) for i in range(6)}


class Edge:
    """Asks over a socket alone."""

    def __init__(self, address, check=lambda: None):
        self._client, self._check = LocalClient(address), check

    def ask(self, method, args, timeout_s):
        return self._client.ask("ask", (method, args), timeout_s, self._check)

    def tell(self, method, args):
        self._client.ask("tell", (method, args), TIMEOUT_S, lambda: None)

    def poll(self, method, args, wait_s, said=None):
        return self._client.ask("poll", (method, args, wait_s, said), wait_s + TIMEOUT_S, self._check)

    def close(self):
        self._client.close()


def test_no_publisher_waits_for_a_receiver_that_was_broken_off_before_its_version_began(monkeypatch):
    monkeypatch.setattr(local_socket, "_SLICE_S", 0.01)
    actor, store = DirectoryActor(1, 3600.0, "auto"), InProcessByteStore()

    def stop():
        raise Interrupt

    with serving(lambda kind, args: getattr(actor, kind)(*args)) as (_, address):
        receiver = WeightReceiver(list, store=store, directory=WeightDirectory(Edge(address, stop)))
        with pytest.raises(Interrupt):
            receiver.apply(1)
        directory = WeightDirectory(Edge(address))
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=1.0)
        for version in range(1, 4):
            assert publisher.publish(MODEL).version == version
        directory.close()
