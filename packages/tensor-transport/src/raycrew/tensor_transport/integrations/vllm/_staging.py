"""How tensors get from the process that has the receiver to the workers of its engine.

What is told goes through vLLM's own messages, so it consists of plain values.
"""

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from raycrew.tensor_transport._bytes import (
    Spot,
    check_tensor,
    copy_bytes,
    parse_torch_dtype,
    tensor_bytes,
    tensor_over,
)
from raycrew.tensor_transport.transports import Offer, Owner, SharedMemoryTransport

Named = tuple[str, torch.Tensor]
Told = dict[str, Any]

_ALIGNMENT = 64
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
    """Tensors are copied once into shared memory of the node, and each worker reads its own slices there.

    They lie in one piece, offered and mapped as a whole: a model may have thousands of tensors.
    """

    def __init__(self) -> None:
        self._transport = SharedMemoryTransport()

    @contextlib.contextmanager
    def lend(self, weights: Sequence[Named]) -> Iterator[Told]:
        """See `Stage`."""
        places = _places(weights)
        offer, room = self._transport.reserve(places[-1])
        try:
            for (name, tensor), start in zip(weights, places[:-1], strict=True):
                copy_bytes(room[start : start + tensor.nbytes], tensor_bytes(tensor, name))
            yield _told(offer, weights, places)
        finally:
            self._transport.withdraw([offer])

    def close(self) -> None:
        """Give the memory back."""
        self._transport.close()


def _places(weights: Sequence[Named]) -> list[int]:
    """Where each tensor begins, and where the last one ends."""
    places = [0]
    for name, tensor in weights:
        check_tensor(tensor, name)
        places.append(places[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return places


def _told(offer: Offer, weights: Sequence[Named], places: Sequence[int]) -> Told:
    """An offer of tensors as plain values."""
    owner = offer.owner
    return {
        "owner": [owner.machine, owner.pid_namespace, owner.pid, owner.started, owner.node_id],
        "folder": offer.key.folder,
        "spot": list(offer.key.spot),
        "size": offer.size_bytes,
        "tensors": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]
            for (name, tensor), start in zip(weights, places[:-1], strict=True)
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
        key = _Key(told["folder"], Spot(*told["spot"]))
        data = transport.map(Offer(transport.name, Owner(*told["owner"]), key, told["size"]))
        for name, dtype, shape, start in told["tensors"]:
            kind = parse_torch_dtype(dtype)
            size = kind.itemsize * torch.Size(shape).numel()
            yield name, tensor_over(data[start : start + size], kind, shape)

    def close(self) -> None:
        """Let go of the mappings; idempotent."""
        if self._transport is not None:
            self._transport.close()
