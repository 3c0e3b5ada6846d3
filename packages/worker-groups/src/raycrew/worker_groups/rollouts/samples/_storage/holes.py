"""Giving parts of a file back to the disk, where the file system can."""

import ctypes
import errno
import os
from typing import Any

# Of <linux/falloc.h>: the file stays as long as it is, and a part of it takes no room any more.
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


def punch(descriptor: int, offset: int, size: int) -> bool:
    """Give a part of a file back, which then reads as zeros; False where the file system can't.

    Raises:
        OSError: Something else is wrong.
    """
    fallocate: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return False
    where = ctypes.c_int64(offset), ctypes.c_int64(size)
    if fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, *where) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))
