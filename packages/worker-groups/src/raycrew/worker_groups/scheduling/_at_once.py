"""The same done for several things at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(function: Callable[[Any], Any], items: Sequence[Any], at_most: int = 16) -> list[Any]:
    """What a function gives for each item, all of them at once; raises the first error once all are done.

    Args:
        function: Called in threads.
        items: What with; one at least.
        at_most: How many threads there are at the same time.
    """
    with ThreadPoolExecutor(min(len(items), at_most), "raycrew-scheduling") as threads:
        calls = [threads.submit(function, item) for item in items]
    return [call.result() for call in calls]
