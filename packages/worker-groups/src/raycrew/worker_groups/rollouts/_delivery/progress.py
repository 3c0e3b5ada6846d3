"""What a collection has done, perhaps in a folder, so that another process goes on with it."""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from raycrew.worker_groups.errors import SampleJournalError, SampleQueueEndedError, SampleQueueError
from raycrew.worker_groups.rollouts._values import Outcome
from raycrew.worker_groups.rollouts.errors import RolloutFileError
from raycrew.worker_groups.rollouts.samples import SampleBatch, SampleQueue

_FORMAT = 1
_NAME = "collection.json"
#: Nobody else takes what whoever collects has in hand.
_LEASE_S = 1e9


class Done(NamedTuple):
    """A prompt whose rollouts have ended.

    Attributes:
        id: Its.
        prompt: It, pickled.
        outcomes: Of its rollouts, in order.
        attempts: How often each was tried.
    """

    id: str
    prompt: bytes
    outcomes: list[Outcome]
    attempts: list[int]


class Progress:
    """Prompts that are done: all of them by id, and those that nobody has taken yet.

    They are the samples of a queue, whose folder and keys are what outlives the process.

    Args:
        folder: Where to write them down; None for memory alone.
        options: What the collection is of: a folder of another one is refused.
        fsync: See `SampleQueue`.

    Attributes:
        run: A name of the collection that no other has.

    Raises:
        RolloutFileError: The folder is in use, damaged, or of another collection.
        OSError: It can't be written to.
    """

    def __init__(self, folder: Path | None, options: Mapping[str, Any], *, fsync: bool = False) -> None:
        self.run = uuid.uuid4().hex
        self._folder = folder
        if folder is None:
            self._queue = SampleQueue(["done"], name="rollouts")
            return
        known = _read(folder / _NAME)
        _check_same(folder, known, options)
        try:
            self._queue = SampleQueue(
                ["done"], name="rollouts", max_keys=None, directory=folder / "done", fsync=fsync
            )
        except SampleJournalError as error:
            raise RolloutFileError(f"the collection in {folder} can't go on: {error}") from error
        try:
            known = _read(folder / _NAME)  # another process may have begun and ended since
            _check_same(folder, known, options)
            if known is None:
                self._check_new(folder)
                known = {"format": _FORMAT, "run": self.run, "options": dict(options)}
                _write(folder / _NAME, known)
            self.run = known["run"]
        except BaseException:
            self._queue.close()
            raise

    def _check_new(self, folder: Path) -> None:
        if self._queue.stats().produced:
            raise RolloutFileError(f"{folder / _NAME} is missing beside what was done: restore it")

    def has(self, prompt: str) -> bool:
        """Whether an earlier collection in the folder has done a prompt."""
        return self._folder is not None and bool(self._queue.known([prompt]))

    def __len__(self) -> int:
        """How many prompts are done and were not taken."""
        return self._queue.stats().held

    def add(self, done: Done) -> None:
        """A prompt is done.

        Raises:
            RolloutFileError: That can't be written down.
        """
        with _written_down():
            keys = None if self._folder is None else [done.id]
            self._queue.put({"done": [tuple(done)]}, version=0, keys=keys)

    def take(self) -> SampleBatch | None:
        """The next that nobody has taken, once there is one; None where none will come any more.

        Raises:
            RolloutFileError: The folder could not be written to meanwhile.
        """
        try:
            with _written_down():
                return self._queue.get(1, lease_s=_LEASE_S)
        except SampleQueueEndedError:
            return None

    def end(self) -> None:
        """No more comes."""
        self._queue.end()

    def close(self) -> None:
        """Give the folder up; idempotent."""
        self._queue.close()


@contextmanager
def in_hand(batch: SampleBatch) -> Iterator[Done]:
    """What was taken, for good at the end of the block; where that raises, it comes again.

    Raises:
        RolloutFileError: That it was taken can't be written down.
    """
    try:
        yield done_in(batch)
    except BaseException:
        with suppress(SampleQueueError):  # the block's own error counts
            batch.give_back()
        raise
    with _written_down():
        batch.done()


def done_in(batch: SampleBatch) -> Done:
    """What was taken."""
    prompt, data, outcomes, attempts = batch["done"][0]
    return Done(prompt, data, [Outcome(*outcome) for outcome in outcomes], attempts)


@contextmanager
def _written_down() -> Iterator[None]:
    try:
        yield
    except SampleJournalError as error:
        raise RolloutFileError(str(error)) from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RolloutFileError(f"{path} is damaged: {error}") from None
    if not isinstance(known, dict) or known.get("format") != _FORMAT:
        raise RolloutFileError(f"{path} was written by another version of raycrew")
    if not isinstance(known.get("run"), str) or not isinstance(known.get("options"), dict):
        raise RolloutFileError(f"{path} is damaged: it does not say what the collection is of")
    return known


def _check_same(folder: Path, known: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    before = options if known is None else known["options"]
    if other := [name for name in options if before.get(name) != options[name]]:
        name = other[0]
        raise RolloutFileError(
            f"{folder} is of another collection: its {name} is {before.get(name)!r}, not {options[name]!r}; "
            "go on with that, or take another folder"
        )


def _write(path: Path, known: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        json.dump(known, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
