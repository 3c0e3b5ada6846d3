"""What each worker of an engine says of an update.

A worker whose part fails must not raise: what the others answered would be taken for the answer to the next
question. So all answer alike, and what became of an update is in a file per rank that the client reads.
"""

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from raycrew.tensor_transport.transports import start_of, this_process

_PREFIX = "raycrew-vllm"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one worker says.

    Attributes:
        serial: Of which update; 0 when the engine was made ready.
        rank: Who, over all data-parallel replicas.
        members: How many there are.
        pid: Its process.
        error: What went wrong; None where nothing did.
    """

    serial: int
    rank: int
    members: int
    pid: int
    error: str | None = None


def tell(folder: str, outcome: Outcome) -> None:
    """Say it, in place of what this rank said before; it is read when all were asked."""
    path = Path(folder, f"{outcome.rank}.json")
    path.unlink(missing_ok=True)  # Of a file that is overwritten, some file systems wait for the disk.
    path.write_text(json.dumps(asdict(outcome)))


class Mailbox:
    """The folder into which the workers of one engine say what became of an update."""

    def __init__(self) -> None:
        _sweep()
        self.folder = tempfile.mkdtemp(prefix=f"{_owned_by_this_process()}-")
        self.close = weakref.finalize(self, _remove, self.folder, os.getpid())
        """Remove it; idempotent, and nothing in a forked child. Who is forgotten does so, too."""

    def read(self, serial: int) -> list[Outcome]:
        """What ranks said of an update, by rank; those that said nothing are not among them."""
        found = [_parsed(path) for path in Path(self.folder).glob("*.json")]
        said = [one for one in found if one is not None and one.serial == serial]
        return sorted(said, key=lambda one: one.rank)


def _parsed(path: Path) -> Outcome | None:
    """What is in a file; None where who wrote it did not come to the end."""
    try:
        return Outcome(**json.loads(path.read_text()))
    except ValueError:
        return None


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _owned_by_this_process() -> str:
    """The name of a folder says whose it is."""
    me = this_process()
    return f"{_PREFIX}-{me.machine:.8}-{_digits(me.pid_namespace)}-{me.pid}-{me.started}"


def _sweep() -> None:
    """Remove what processes left behind that were killed."""
    for path in _leftovers():
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def _leftovers() -> Iterator[Path]:
    me = this_process()
    here = f"{_PREFIX}-{me.machine:.8}-{_digits(me.pid_namespace)}-"
    for path in Path(tempfile.gettempdir()).glob(f"{here}*-*-*"):
        pid, started, *_ = path.name.removeprefix(here).split("-")
        if pid.isdigit() and started.isdigit() and start_of(int(pid)) != int(started):
            yield path


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text)) or "0"
