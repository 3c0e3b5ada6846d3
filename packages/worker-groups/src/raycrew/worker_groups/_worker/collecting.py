"""Python's collector of garbage while large modules are imported, and when a worker ends.

What is imported stays, and is a lot: the collector goes through all of it again and again while it comes in,
later whenever it looks at all that there is, and several times at the end.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import large libraries within without collecting garbage meanwhile.

    What is in the process afterwards is taken to stay, and is not collected until `gc.unfreeze`; where
    nothing was imported, nothing changes. A worker's class is imported so; this is for what its methods
    import. What is set of the collector within stays so.

    Examples:
        >>> with heavy_imports():
        ...     import decimal
    """
    gc.collect()  # else what is garbage by now would stay, too
    before, known = gc.get_threshold(), len(sys.modules)
    gc.set_threshold(0, *before[1:])
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)
    if len(sys.modules) > known:
        gc.freeze()


def collect_at_last() -> None:
    """Run the finalizers of all that is garbage by now, and leave the rest to the end of the process."""
    gc.collect()
    gc.freeze()
