"""Bytes by NIXL, through Ray's direct transport of tensors."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import fold_in_sections, tensor_bytes
from raycrew.tensor_transport.transports._choosing import this_process
from raycrew.tensor_transport.transports._interface import Buffer, Capabilities, Guard, Offer, bytes_of
from raycrew.tensor_transport.transports._pulling import Job, Puller, damaged, gone


class NixlTransport(Puller):
    """Offers lend memory that NIXL reads from other nodes, over whatever network it knows.

    Ray's direct transport is in its alpha stage, and NIXL an option: `choose_transport` takes it only where
    it is named. An object is moved whole. Without a deadline it is moved into the buffer itself, and a
    cancellation is heeded when it has arrived; with one, by way of a buffer of its own, as a transfer that
    was given up on may still be written.

    Args:
        pool_bytes: Register so much memory on `device` once, for what is received by way of it.
        device: Where offers and the pool are kept: "cpu" or a CUDA device. Buffers are on the CPU.
    """

    name = "nixl"

    def __init__(self, *, pool_bytes: int = 0, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._held: dict[str, tuple[Any, torch.Tensor]] = {}
        self._holding, self._getting = threading.Lock(), threading.Condition()
        self._under_get: set[str] = set()
        super().__init__()
        if pool_bytes:
            self._ready_to_offer()
            _ray.register_nixl_pool(pool_bytes, self._device)

    @property
    def capabilities(self) -> Capabilities:
        """Wherever NIXL reaches; Ray asks the owner's process about each object first."""
        return Capabilities(reach="cluster")

    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """See `PullTransport.offer`."""
        self._ready_to_offer()
        raw = bytes_of(data, "what is offered").to(self._device)
        if raw.is_cuda:  # Others read it past all streams.
            torch.cuda.current_stream(raw.device).synchronize()
        ref = _ray.put_by_nixl(raw)
        with self._holding:
            self._held[ref.hex()] = (ref, raw)
        return Offer(self.name, this_process(), ref, raw.numel(), fold_in_sections(raw) if folded else None)

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """See `PullTransport.withdraw`: whoever holds the offer still can have the bytes."""
        with self._holding:
            for offer in offers:
                self._held.pop(offer.key.hex(), None)

    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        for job in jobs:
            guard.check()
            target = torch.from_numpy(job.target)
            straight = job.region.is_whole and guard.left_s() is None
            found = self._get(job.offer, target if straight else None, guard)
            if found.numel() != job.offer.size_bytes:
                raise gone(job.offer, f"{found.numel()} bytes are there")
            if found.data_ptr() != target.data_ptr():
                job.copy_from(tensor_bytes(found), guard)
            elif job.offer.fold is not None and fold_in_sections(job.target) != job.offer.fold:
                raise damaged(job.offer)

    def _get(self, offer: Offer, into: torch.Tensor | None, guard: Guard) -> torch.Tensor:
        with self._turn(offer.key.hex(), guard):  # A target belongs to the object, not to who asks for it.
            found: torch.Tensor = _ray.get_by_nixl(offer.key, into, guard.left_s())
            return found

    @contextlib.contextmanager
    def _turn(self, name: str, guard: Guard) -> Iterator[None]:
        """Wait until nobody else gets this object; others may be got meanwhile."""
        guard.on_stop(self._wake)
        with self._getting:
            while name in self._under_get:
                guard.check()
                self._getting.wait(guard.left_s())
            guard.check()
            self._under_get.add(name)
        try:
            yield
        finally:
            with self._getting:
                self._under_get.discard(name)
                self._getting.notify_all()

    def _wake(self) -> None:
        with self._getting:
            self._getting.notify_all()

    def _release(self) -> None:
        self._held.clear()

    def _forget(self) -> None:
        """A forked child can't use Ray: what it pulls or offers is refused."""
        self._holding, self._getting = threading.Lock(), threading.Condition()
        self._under_get = set()
