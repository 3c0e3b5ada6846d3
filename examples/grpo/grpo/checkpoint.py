"""Everything that a run needs to go on, in one file that is whole or not there."""

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from grpo.config import RunConfig
from grpo.errors import ExampleError
from grpo.history import History

FILE = "latest.pt"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run between two rounds. The round is the position in the data, too: the seed decides the rest.

    Attributes:
        settings: What decides the curve, by name; see `settings_of`.
        history: What was measured so far.
        version: Of the weights that the generators held.
        policy: What the policy had learnt, with optimizer, reference and the random state of each rank.
    """

    settings: Mapping[str, Any]
    history: History
    version: int
    policy: Mapping[str, Any]

    @property
    def step(self) -> int:
        """How many rounds were done."""
        return len(self.history.steps)

    def save(self, folder: Path) -> None:
        """Write it in place of the one before, which stays if this fails.

        Raises:
            ExampleError: It can't be written.
        """
        content = {"format": FORMAT, **{name: getattr(self, name) for name in self.__slots__}}
        buffer = io.BytesIO()
        torch.save({**content, "history": asdict(self.history)}, buffer)
        payload = buffer.getvalue()
        try:
            _write(folder / FILE, hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
        except OSError as error:
            raise ExampleError(f"cannot write the checkpoint {folder / FILE}: {error.strerror}") from error

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The last one that was written.

        Raises:
            ExampleError: There is none, or it is damaged.
        """
        file = folder / FILE
        try:
            digest, _, payload = file.read_bytes().partition(b"\n")
        except FileNotFoundError:
            raise ExampleError(f"there is no checkpoint {file}: start without --resume") from None
        except OSError as error:
            raise ExampleError(f"cannot read the checkpoint {file}: {error.strerror}") from error
        if digest != hashlib.sha256(payload).hexdigest().encode():
            raise ExampleError(f"the checkpoint {file} is damaged: start without --resume")
        content = torch.load(io.BytesIO(payload), weights_only=True)
        if (found := content.pop("format")) != FORMAT:
            raise ExampleError(f"the checkpoint {file} has format {found}, not {FORMAT}")
        return cls(**{**content, "history": History.from_dict(content["history"])})

    def check(self, settings: Mapping[str, Any]) -> None:
        """See that it is of a run with these settings, of which not all need be given.

        Raises:
            ExampleError: It is of another run; the message says what differs.
        """
        differences = [
            f"{name} is {value}, and was {self.settings.get(name)}"
            for name, value in settings.items()
            if value != self.settings.get(name)
        ]
        if differences:
            raise ExampleError(f"the checkpoint is of another run: {'; '.join(differences)}")


def settings_of(config: RunConfig, **others: Any) -> dict[str, Any]:
    """What decides a curve, by name: all but how long it is."""
    flat = dict(_flat(asdict(config)))
    del flat["grpo.steps"]
    return {**flat, **others}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write(file: Path, content: bytes) -> None:
    """Replace a file by another one that is on the disk by then."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    try:
        with new.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
