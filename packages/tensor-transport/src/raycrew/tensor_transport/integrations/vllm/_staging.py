"""How tensors get from the process that has the receiver to the workers of its engine.

What is told goes through vLLM's own messages, so it consists of plain values.
"""

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from raycrew.tensor_transport._bytes import Spot, parse_torch_dtype, tensor_over
from raycrew.tensor_transport.transports import Offer, Owner, SharedMemoryTransport

Named = tuple[str, torch.Tensor]
Told = dict[str, Any]

_OF_THIS_PROCESS: dict[str, Sequence[Named]] = {}


class _Key(NamedTuple):
    """What an offer in shared memory is found by."""

    folder: str
    spot: Spot


class Stage(Protocol):
    """Has tensors at hand for the workers while an update lasts."""

    def lend(self, weights: Sequence[Named]) -> contextlib.AbstractContextManager[Told]:
        """Tensors that workers may read within the context, as what they have to be told."""
        ...

    def close(self) -> None:
        """Give up what is held; idempotent."""
        ...


class OwnProcess:
    """The engine's worker is this process: tensors are handed on as they are."""

    @contextlib.contextmanager
    def lend(self, weights: Sequence[Named]) -> Iterator[Told]:
        """See `Stage`."""
        key = uuid.uuid4().hex
        _OF_THIS_PROCESS[key] = weights
        try:
            yield {"key": key}
        finally:
            del _OF_THIS_PROCESS[key]

    def close(self) -> None:
        """Nothing is held."""


class SharedMemory:
    """Tensors are copied once into shared memory of the node, and each worker reads its own slices there."""

    def __init__(self) -> None:
        self._transport = SharedMemoryTransport()

    @contextlib.contextmanager
    def lend(self, weights: Sequence[Named]) -> Iterator[Told]:
        """See `Stage`."""
        offers: list[Offer] = []
        try:
            for _, tensor in weights:
                offers.append(self._transport.offer(tensor.contiguous()))
            yield told_of(weights, offers)
        finally:
            self._transport.withdraw(offers)

    def close(self) -> None:
        """Give the memory back."""
        self._transport.close()


def told_of(weights: Sequence[Named], offers: Sequence[Offer]) -> Told:
    """Offers of one process as plain values."""
    if not offers:
        return {"owner": None, "tensors": []}
    owner = offers[0].owner
    return {
        "owner": [owner.machine, owner.pid_namespace, owner.pid, owner.started, owner.node_id],
        "folder": offers[0].key.folder,
        "tensors": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(offer.key.spot)]
            for (name, tensor), offer in zip(weights, offers, strict=True)
        ],
    }


class Reader:
    """A worker's side: the tensors that it was told of, in place."""

    def __init__(self) -> None:
        self._transport: SharedMemoryTransport | None = None

    def read(self, told: Mapping[str, Any]) -> Iterator[Named]:
        """(name, tensor), one after another; they are valid while the update lasts, and not to be written.

        Raises:
            ShardError: The memory is gone, or of another machine.
        """
        if "key" in told:
            yield from _OF_THIS_PROCESS[told["key"]]
            return
        transport = self._transport = self._transport or SharedMemoryTransport()
        for name, dtype, shape, spot in told["tensors"]:
            kind = parse_torch_dtype(dtype)
            size = kind.itemsize * torch.Size(shape).numel()
            offer = Offer(transport.name, Owner(*told["owner"]), _Key(told["folder"], Spot(*spot)), size)
            yield name, tensor_over(transport.map(offer), kind, shape)

    def close(self) -> None:
        """Let go of the mappings; idempotent."""
        if self._transport is not None:
            self._transport.close()
