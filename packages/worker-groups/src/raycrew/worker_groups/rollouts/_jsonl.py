"""A file of JSON to which each prompt adds one line, once, whoever is killed meanwhile."""

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raycrew.worker_groups.rollouts._values import RolloutFailure
from raycrew.worker_groups.rollouts.errors import RolloutFileError


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
    """The file, which is this process's alone as long as it is open; a last line without an end is cut off.

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
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._heal()
            self.ids = set(self._read())
        except BlockingIOError:
            self.close()
            raise RolloutFileError(f"{path} is in use by another collection") from None
        except BaseException:
            self.close()
            raise

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
                os.ftruncate(self._file, self._end)
            if isinstance(error, OSError):
                raise RolloutFileError(f"{self._path} can't be written to: {error}") from error
            raise
        self._end += len(line)
        self.ids.add(prompt)

    def close(self) -> None:
        """Give the file up; idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write(self, line: bytes) -> None:
        rest, offset = memoryview(line), self._end
        while rest:
            written = os.pwrite(self._file, rest, offset)
            rest, offset = rest[written:], offset + written
        if self._is_synced:
            os.fsync(self._file)

    def _heal(self) -> int:
        """Where the last whole line ends; what is behind it goes."""
        end = os.fstat(self._file).st_size
        while end:
            begin = max(0, end - (1 << 16))
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        os.ftruncate(self._file, end)
        return end

    def _read(self) -> Iterator[str]:
        with os.fdopen(os.dup(self._file), "rb") as lines:
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                yield self._id_of(line, number)

    def _id_of(self, line: bytes, number: int) -> str:
        try:
            found: Any = json.loads(line)["id"]
        except (ValueError, TypeError, KeyError) as error:
            raise RolloutFileError(f"line {number} of {self._path} is of no prompt: {error}") from None
        if not isinstance(found, str):
            raise RolloutFileError(f"line {number} of {self._path} has the id {found!r}, which is no string")
        return found
