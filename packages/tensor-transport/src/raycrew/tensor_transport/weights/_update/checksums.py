"""Checksums of bytes and of weights: for damage on the way, not against somebody who means to deceive."""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from raycrew.tensor_transport._bytes import fold_in_sections, tensor_bytes
from raycrew.tensor_transport.protocols import Bytes


def checksum(data: Bytes | torch.Tensor) -> int:
    """A position-sensitive fold to 64 bits, in the time of one look at the bytes, where they are."""
    return fold_in_sections(data)


def digest_weights(weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of names, dtypes, shapes and values, whatever the order: equal where the weights are equal.

    What a trainer says of its model and a generator of its own can be compared after an update. A DTensor is
    to be gathered first (`gather_weights`).

    Raises:
        UnsupportedTensorError: A tensor has no plain bytes.
    """
    total = 0
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        head = repr((name, str(tensor.dtype), tuple(tensor.shape), checksum(tensor_bytes(tensor, name))))
        total += int.from_bytes(hashlib.blake2b(head.encode(), digest_size=16).digest(), "little")
    return f"{total % (1 << 128):032x}"
