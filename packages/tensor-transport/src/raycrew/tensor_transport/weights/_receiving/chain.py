"""Versions that are applied one after another, each added to the one before."""

import time
from collections.abc import Callable, Sequence

from raycrew.tensor_transport.errors import StaleVersionError
from raycrew.tensor_transport.weights._receiving.held import Held
from raycrew.tensor_transport.weights._receiving.receipt import WeightReceipt


def apply_chain(
    chain: Sequence[int],
    deadline: float | None,
    held: Callable[[], Held],
    apply: Callable[[int, float | None], WeightReceipt],
) -> WeightReceipt | None:
    """Come to the last one; the receipt is its, None of no versions.

    Those before it that are older than what is held are had: who was handed versions themselves does not know
    that the directory has a number for what they hold.

    Raises:
        StaleVersionError: The last one is older, or what is held is a mixture.
    """
    receipt = None
    for place, version in enumerate(chain, 1):
        try:
            receipt = apply(version, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except StaleVersionError:
            if place == len(chain) or not held().is_whole:
                raise
    return receipt
