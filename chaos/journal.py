"""What a run has done, appended line by line and kept through a kill, so that it can be resumed."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Result = Literal["recovered", "broken", "hung", "missed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What came of one fault.

    Attributes:
        number: Which of the plan.
        kind: Name of its kind.
        moment: In the midst of what it happened.
        result: Whether everything worked again afterwards; or that the fault happened to nobody, or was
            not injected: why is in `notes`.
        sent: Items under way, and how many of them were answered or named in an error.
        answered: See `sent`.
        failed: See `sent`.
        wrong: Items that were lost, doubled or wrong, with the reason.
        leaked: What was left behind.
        stall_s: From the fault until everything worked again.
        by_design: Results that were lost as the driver that owned them was killed.
        took_s: The whole round, what was asked afterwards included.
        notes: What else there is to say.
    """

    number: int
    kind: str
    moment: str
    result: Result
    sent: int = 0
    answered: int = 0
    failed: int = 0
    wrong: tuple[str, ...] = ()
    leaked: tuple[str, ...] = ()
    stall_s: float = 0.0
    by_design: int = 0
    took_s: float = 0.0
    notes: str = ""


class Journal:
    """The file of a run: a line that says which run it is, then one for each outcome.

    Args:
        path: The file.
        run: What tells this run from others: its seed, its size.
        resume: Whether to go on with what the file has; else there must be none.

    Raises:
        ValueError: The file is there and not to be resumed, or is another run's.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.outcomes: dict[int, Outcome] = {}
        if path.exists() and path.stat().st_size:
            if not resume:
                raise ValueError(f"{path} is there already: go on with --resume, or name another --journal")
            self._read(json.loads(json.dumps(run)))
        else:
            self._append({"run": run})

    def add(self, outcome: Outcome) -> None:
        """Write an outcome down; when this returns, it is on the disk."""
        self.outcomes[outcome.number] = outcome
        self._append(vars(outcome))

    def _read(self, run: Mapping[str, Any]) -> None:
        first, *lines = _whole_lines(self.path)
        if first != {"run": run}:
            raise ValueError(f"{self.path} is of another run, {first.get('run')}, not {run}")
        for line in lines:
            outcome = Outcome(**line | {"wrong": tuple(line["wrong"]), "leaked": tuple(line["leaked"])})
            self.outcomes[outcome.number] = outcome

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within, no other run has this journal.

    Raises:
        ValueError: One has it now.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes {path} at the moment: name another --journal") from None
        yield


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was not written to its end is cut off."""
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()] or [{}]
