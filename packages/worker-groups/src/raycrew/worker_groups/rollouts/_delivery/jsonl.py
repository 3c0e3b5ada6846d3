"""A file of JSON to which each prompt adds one line, once, whoever is killed meanwhile."""

import fcntl
import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raycrew.worker_groups.rollouts._files import OpenFile
from raycrew.worker_groups.rollouts._values import RolloutFailure
from raycrew.worker_groups.rollouts.errors import RolloutFileError

_BEGIN = b'{"id":'
_locked: weakref.WeakSet["JsonLines"] = weakref.WeakSet()


def _forget_locks() -> None:
    """Have a forked child not keep a file locked when its parent has ended."""
    for lines in list(_locked):
        lines.forget()


os.register_at_fork(after_in_child=_forget_locks)


def line_of(prompt: str, texts: Sequence[str], failures: Mapping[int, RolloutFailure]) -> bytes:
    """A prompt's line: {"id": …, "samples": […], "failures": {"1": {"kind": …, "message": …}}}.

    Args:
        prompt: The prompt's id.
        texts: The samples as JSON; whatever in the places of those that failed.
        failures: Those that failed, by their places.
    """
    samples = ",".join("null" if i in failures else text for i, text in enumerate(texts))
    told = {i: {"kind": f.kind, "message": f.message, "attempts": f.attempts} for i, f in failures.items()}
    of_failures = f',"failures":{json.dumps(told)}' if told else ""
    return f'{{"id":{json.dumps(prompt)},"samples":[{samples}]{of_failures}}}\n'.encode()


class JsonLines:
    """The file, which is this process's alone as long as it is open.

    A last line that was never finished is cut off, and one that only lacks its end gets it; nothing else that
    is there is touched.

    Args:
        path: The file; made where there is none.
        is_synced: Whether each line is on the disk itself before it counts.

    Attributes:
        ids: The prompts whose lines are there.

    Raises:
        RolloutFileError: Another process adds to it, or it is no such file.
        OSError: It can't be opened.
    """

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        self._path, self._is_synced, self._lock = path, is_synced, threading.Lock()
        self._file = OpenFile.at(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end, self.ids = 0, set[str]()
            self._read()
        except BlockingIOError:
            self.close()
            raise RolloutFileError(f"{path} is in use by another collection") from None
        except BaseException:
            self.close()
            raise
        _locked.add(self)

    def add(self, prompt: str, line: bytes) -> None:
        """Add a prompt's line, unless it is there.

        Raises:
            RolloutFileError: It can't be written; nothing of it is left there.
        """
        with self._lock:
            if prompt not in self.ids:
                self._add(prompt, line)

    def _add(self, prompt: str, line: bytes) -> None:
        try:
            self._write(line)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._file.descriptor, self._end)
            if isinstance(error, OSError):
                raise RolloutFileError(f"{self._path} can't be written to: {error}") from error
            raise
        self._end += len(line)
        self.ids.add(prompt)

    def close(self) -> None:
        """Give the file up; idempotent."""
        with self._lock:
            self._file.close()

    def forget(self) -> None:
        """Give the file up in a forked child, whose copy of the lock some thread may have held."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        descriptor, rest, offset = self._file.descriptor, memoryview(line), self._end
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
        if self._is_synced:
            os.fsync(descriptor)

    def _read(self) -> None:
        """Note whose lines are there, and where the last one ends."""
        with os.fdopen(os.dup(self._file.descriptor), "rb") as lines:
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    self._settle(line, number)
                    return
                self.ids.add(self._id_of(line, number))
                self._end += len(line)

    def _settle(self, line: bytes, number: int) -> None:
        """A last line without an end: gets it, or goes."""
        if _is_cut(line):
            os.ftruncate(self._file.descriptor, self._end)
        else:
            self._add(self._id_of(line, number), line + b"\n")

    def _id_of(self, line: bytes, number: int) -> str:
        try:
            found: Any = json.loads(line)["id"]
        except (ValueError, TypeError, KeyError) as error:
            raise RolloutFileError(f"line {number} of {self._path} is of no prompt: {error}") from None
        if not isinstance(found, str):
            raise RolloutFileError(f"line {number} of {self._path} has the id {found!r}, which is no string")
        return found


def _is_cut(line: bytes) -> bool:
    """Whether it may be one of these that was never finished."""
    with suppress(ValueError):
        json.loads(line)
        return False
    return line.startswith(_BEGIN) or _BEGIN.startswith(line) or not any(line)
