"""The errors of this package, one tree under `VenvError`."""

import errno
import re
from collections.abc import Sequence
from pathlib import Path


class VenvError(Exception):
    """Something about an environment went wrong; every error of this package is one."""


class InputsChangedError(VenvError):
    """What an environment is made from changed each time while it was made; nothing was published."""


class SpecError(VenvError, ValueError):
    """A specification cannot be understood, or contradicts itself. Raised before anything is built."""


class UvNotFoundError(VenvError):
    """There is no uv in this interpreter's environment nor on the PATH."""


class UvError(VenvError):
    """uv ended with an error.

    Attributes:
        command: The command line that was run.
        returncode: Its exit status; negative where a signal ended it.
        tail: The last lines that uv wrote.
    """

    def __init__(
        self, message: str, *, command: Sequence[str] = (), returncode: int = 1, tail: str = ""
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.returncode = returncode
        self.tail = tail


class UvVersionError(UvError):
    """This uv is older than what the environment needs."""


class ResolutionError(UvError):
    """No set of packages satisfies the specification."""


class LockOutdatedError(UvError):
    """The lock file does not fit its project file."""


class ConflictingExtrasError(UvError):
    """Extras or groups that the project declares as conflicting were asked for together."""


class NetworkError(UvError):
    """An index or a download could not be reached."""


class CredentialsError(VenvError):
    """An index asks for credentials that this machine does not have.

    Attributes:
        index: Name of the index.
    """

    def __init__(self, message: str, *, index: str = "") -> None:
        super().__init__(message)
        self.index = index


class DiskFullError(UvError):
    """No space is left where the environment or uv's cache lies."""


class BuildFailedError(UvError):
    """A package could not be built or installed."""


class BuildTimeoutError(UvError, TimeoutError):
    """uv did not end in time and was killed."""


class StoreError(VenvError):
    """The store of environments cannot be used."""


class ReadOnlyStoreError(StoreError):
    """The environment is not in the store, and the store cannot be written to."""


class UntrustedStoreError(StoreError):
    """Somebody else could have put an interpreter into the store; nothing of it was run."""


class EnvironmentInUseError(StoreError):
    """Something runs from the environment that should be replaced or removed."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Another process held the environment's lock until the deadline."""


class ProbeError(VenvError):
    """An interpreter cannot be used.

    Attributes:
        python: Path of the interpreter.
        tail: The last lines that it wrote.
    """

    def __init__(self, message: str, *, python: str = "", tail: str = "") -> None:
        super().__init__(message)
        self.python = python
        self.tail = tail


class IncompatibleEnvironmentError(ProbeError):
    """An interpreter runs, but its Python, Ray or raycrew does not fit the driver's."""


class ProvisionError(VenvError):
    """An environment could not be brought to every node.

    Attributes:
        failures: Node id to what went wrong there.
    """

    def __init__(self, message: str, *, failures: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


def fault_of(error: Exception) -> str:
    """What kind of fault a parser found in a file and where; not in its words, which may quote a password."""
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"{type(error).__name__} at byte {error.start}"
    listed = getattr(error, "errors", ())  # of configparser
    line = getattr(error, "lineno", None) or (listed[0][0] if listed else None)
    told = re.search(r"\(at (line \d+, column \d+|end of document)\)", str(error))
    where = f" at line {line}" if line else f" at {told[1]}" if told else ""
    return f"{type(error).__name__}{where}"


def of_store(error: OSError, path: Path) -> VenvError:
    """The error that a failure of the operating system in a store means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no space is left for {path}: {error}; `raycrew-env gc` frees some")
    return StoreError(f"{path} cannot be written: {error}")
