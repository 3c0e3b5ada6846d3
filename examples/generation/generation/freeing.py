"""Memory that a process has freed goes back to the machine."""

import ctypes
import gc
import sys


def give_back() -> None:
    """Collect what nobody refers to, and have the allocators keep nothing of what is free, where they can."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
