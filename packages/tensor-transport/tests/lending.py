"""A pull transport within one process, which can be slow, lose offers and damage bytes."""

import itertools
import threading

import numpy as np
import torch

from raycrew.tensor_transport.errors import StaleHandleError
from raycrew.tensor_transport.transports import Capabilities, Offer, Transfer, this_process


class LendingTransport:
    """Offers are the very memory; what was pulled is counted."""

    name = "lending"

    def __init__(self, maps=False):
        self.capabilities = Capabilities(reach="process", maps=maps)
        self.held = {}
        self.pulled_bytes = 0
        self.largest_bytes = 0
        self.damage = False
        self.stalled = threading.Event()
        self.stalled.set()
        self._keys = itertools.count()

    def available(self):
        return None

    def offer(self, data, *, folded=False):
        key = next(self._keys)
        self.held[key] = data if isinstance(data, np.ndarray) else data.view(torch.uint8).numpy()
        return Offer(self.name, this_process(), key, self.held[key].nbytes)

    def pull(self, regions, into, *, timeout_s=None):
        transfer = Transfer("a pull", sum(r.size_bytes for r in regions), timeout_s=timeout_s)
        transfer.guard.on_stop(self.stalled.set)
        threading.Thread(target=transfer.run, args=(lambda guard: self._move(regions, into, guard),)).start()
        return transfer

    def map(self, offer, *, timeout_s=None):
        return self._bytes(offer)

    def withdraw(self, offers):
        for offer in offers:
            self.held.pop(offer.key, None)

    def close(self):
        self.held.clear()

    def _bytes(self, offer):
        if offer.key not in self.held:
            raise StaleHandleError("withdrawn")
        return self.held[offer.key]

    def _move(self, regions, into, guard):
        self.largest_bytes = max(self.largest_bytes, sum(r.size_bytes for r in regions))
        for region, buffer in zip(regions, into, strict=True):
            if not self.stalled.wait(guard.left_s()):
                raise guard.too_late()
            guard.check()
            assert buffer.nbytes == region.size_bytes
            buffer[:] = self._bytes(region.offer)[region.offset : region.offset + region.size_bytes]
            if self.damage and region.size_bytes:
                buffer[0] ^= 1
            self.pulled_bytes += region.size_bytes
