"""Files that are there as a whole or not at all."""

import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from raycrew.tensor_transport.protocols import Bytes

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_whole(path: Path, parts: Iterable[bytes | Bytes]) -> None:
    """Write a file under another name, have it on the disk, and only then give it its name.

    Whoever reads `path` sees what was there before or all of the new file, whatever happens to this process
    or the machine meanwhile. A file that is replaced keeps its permissions, and the umask has a say in those
    of others.
    """
    replaced = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        fd = os.open(partial, _NEW, 0o666 if replaced is None else 0o600)
        with os.fdopen(fd, "wb") as file:
            if replaced is not None:
                os.fchmod(fd, replaced)
            for part in parts:
                file.write(part if isinstance(part, bytes) else part.data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
