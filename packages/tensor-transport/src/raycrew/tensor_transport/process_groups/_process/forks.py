"""What a forked child may not end, because the threads that would have to end with it are its parent's."""

import ctypes


def keep_for_ever(*objects: object) -> None:
    """Never destroy these: their destructors wait for threads that a forked child does not have."""
    for thing in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
