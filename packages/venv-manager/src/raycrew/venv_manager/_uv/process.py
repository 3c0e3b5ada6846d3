"""The only place that runs uv; what it writes becomes one clear error."""

import contextlib
import importlib.metadata
import logging
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

from packaging.version import Version

from raycrew.venv_manager import errors
from raycrew.venv_manager._uv.access import hiding
from raycrew.venv_manager._waiting import LOOK_S, PerProcess, end, start

logger = logging.getLogger(__name__)

OLDEST = (0, 12, 20)  # those before read an exchanged wheel of the same size, or a lock's folders, wrongly
TAIL_LINES = 30
_ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
# What uv writes, to the class of error and the next step. The first that matches counts.
_CAUSES: tuple[tuple[str, type[errors.UvError], str], ...] = (
    (
        r"No space left on device|os error 28|Disk quota exceeded",
        errors.DiskFullError,
        "no space is left; `raycrew-env gc` and `uv cache prune` free some, "
        "RAYCREW_VENV_DIR and UV_CACHE_DIR move both elsewhere",
    ),
    (
        r"lockfile .*needs to be updated|[Uu]nable to find lockfile|outdated lockfile",
        errors.LockOutdatedError,
        "the lock file does not fit the project file; run `uv lock` in the project and commit the result",
    ),
    (
        r"declared as conflicting|are incompatible with the (declared )?conflicts",
        errors.ConflictingExtrasError,
        "extras or groups were combined that the project declares as conflicting; make them two environments",
    ),
    (
        r"error sending request|dns error|failed to lookup address|Connection refused|tcp connect error|"
        r"Failed to fetch|Network connectivity is disabled|network was disabled|timed out|"
        r"the network is unreachable|packages? was not found in the cache",
        errors.NetworkError,
        "an index or a file could not be reached (or uv is offline and its cache does not hold it); check "
        "the network and the indexes, or name a wheelhouse",
    ),
    (
        r"unexpected argument|unknown field|Required uv version|unrecognized subcommand|"
        r"invalid value .* for '--",
        errors.UvVersionError,
        "this uv does not know an option that is needed; install a newer one (`pip install -U uv`)",
    ),
    (
        r"No solution found|unsatisfiable|No interpreter found|not found in the package registry|"
        r"does not satisfy|is not compatible with|has no usable wheels|no wheels with a matching|"
        r"Extra `?.*`? is not defined|Group `?.*`? is not defined|does not have .*(extra|group)",
        errors.ResolutionError,
        "the requirements cannot be met together; uv's explanation follows",
    ),
)


def find_uv(environ: Mapping[str, str] = os.environ) -> str:
    """Path of uv: `RAYCREW_UV`, else the one installed with this package, else the one on the PATH.

    Raises:
        UvNotFoundError: There is none.
        UvVersionError: It is too old.
    """
    return _found(environ)[0]


def uv_version(environ: Mapping[str, str] = os.environ) -> str:
    """Version of the uv that `find_uv` gives.

    Raises:
        UvNotFoundError: There is none.
        UvVersionError: It is too old.
    """
    return _found(environ)[1]


def _found(environ: Mapping[str, str]) -> tuple[str, str]:
    named = environ.get("RAYCREW_UV")
    if named and not os.access(named, os.X_OK):
        raise errors.UvNotFoundError(f"RAYCREW_UV names {named}, which is no program")
    with _finding.here:
        installed = None if named else _installed_uv()
    if installed is not None:
        return installed
    path = named or shutil.which("uv", path=environ.get("PATH"))
    if path is None:
        raise errors.UvNotFoundError(
            "uv is neither installed beside raycrew-venv-manager nor on the PATH; `pip install uv`, or name "
            "it in RAYCREW_UV"
        )
    stat = Path(path).stat()
    version = _asked(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    if Version(version).release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise errors.UvVersionError(
            f"{path} is uv {version}, older than {oldest}: install a newer one (`pip install -U uv`)"
        )
    return path, version


@lru_cache(maxsize=8)
def _asked(path: str, _mark: tuple[int, int, int]) -> str:
    """What a uv says of itself; asked again only after the file has changed."""
    said = run_uv(["--version"], environ=os.environ, timeout_s=60.0, uv=path)
    if (match := re.match(r"uv (\d+\.\d+\S*)", said)) is None:
        raise errors.UvVersionError(f"{path} does not say its version as uv does\n{said}", tail=said)
    return match[1]


_finding = PerProcess(threading.Lock)  # sysconfig's first use is not safe in several threads at once


@lru_cache(maxsize=1)
def _installed_uv() -> tuple[str, str] | None:
    """Path and version of the uv that is installed as a package beside this one."""
    try:
        from uv import find_uv_bin

        return str(find_uv_bin()), importlib.metadata.version("uv")
    except (ImportError, FileNotFoundError):  # metadata that is absent is an ImportError, too
        return None


def run_uv(
    arguments: Sequence[str | Path],
    *,
    environ: Mapping[str, str],
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float = 3600.0,
    pass_fds: Sequence[int] = (),
    uv: str | None = None,
) -> str:
    """Run uv to its end and return what it wrote to its standard output.

    Args:
        arguments: Everything after `uv`.
        environ: The whole environment of the process.
        cwd: Its working folder.
        on_line: Called with each line of its standard error, for progress.
        timeout_s: After so long it is killed with all its children.
        pass_fds: File descriptors that it inherits (a lock that must outlive this process).
        uv: Path of uv; found if left out.

    Raises:
        UvNotFoundError: There is no uv.
        UvError: It failed; the subclass says how.
        BuildTimeoutError: It did not end in time.
    """
    command = [uv or find_uv(environ), *(str(a) for a in arguments)]
    logger.debug("running %s", shlex.join(command))
    variables = dict(environ) | {"NO_COLOR": "1", "UV_NO_PROGRESS": "1"}
    try:
        process = start(command, environ=variables, cwd=cwd, pass_fds=pass_fds)
    except OSError as error:
        raise errors.UvNotFoundError(f"{command[0]} cannot be run: {error}") from error
    return _finish(process, command, on_line, timeout_s, hiding(variables))


def _finish(
    process: "subprocess.Popen[str]",
    command: list[str],
    on_line: Callable[[str], None] | None,
    timeout_s: float,
    hide: Callable[[str], str],
) -> str:
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    output: list[str] = []

    def follow(stream: IO[str]) -> None:
        for raw in stream:
            line = hide(_ANSI.sub("", raw).rstrip())
            tail.append(line)
            if on_line is not None and line:
                on_line(line)

    readers = [
        threading.Thread(target=follow, args=(process.stderr,), daemon=True),
        threading.Thread(target=_collect, args=(process.stdout, output), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        if not _ends(process, timeout_s):
            raise errors.BuildTimeoutError(
                f"uv {command[1]} did not end within {timeout_s:g} s and was killed\n" + "\n".join(tail),
                command=command,
                tail="\n".join(tail),
            )
    finally:
        end(process)
        for reader in readers:
            reader.join(timeout=10)
    if process.returncode:
        text = "\n".join(tail) or hide("".join(output))[-4000:]
        raise translated(command, process.returncode, text)
    return "".join(output)


def _ends(process: "subprocess.Popen[str]", timeout_s: float) -> bool:
    """Whether a process ends in time, known at once: `Popen.wait` with a timeout looks every 50 ms only."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # no such call here
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.returncode is not None
    deadline = time.monotonic() + timeout_s
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        while not waiting.poll(LOOK_S * 1e3):
            if time.monotonic() >= deadline:
                return False
    finally:
        os.close(descriptor)
    process.wait()
    return True


def _collect(stream: Iterable[str], into: list[str]) -> None:
    into.extend(stream)


def translated(command: Sequence[str], returncode: int, tail: str) -> errors.UvError:
    """The error that a failed uv command means."""
    kind: type[errors.UvError] = errors.BuildFailedError
    advice = "see uv's last lines"
    for pattern, candidate, text in _CAUSES:
        if re.search(pattern, tail):
            kind, advice = candidate, text
            break
    else:
        if returncode < 0:
            named = {one.value: one.name for one in signal.Signals}  # not all real-time ones
            advice = f"it was ended by {named.get(-returncode, f'signal {-returncode}')} (out of memory?)"
    verb = next((word for word in command[1:] if not word.startswith("-")), "")
    return kind(
        f"uv {verb} failed: {advice}\n{tail}\n(command: {shlex.join(command)})",
        command=command,
        returncode=returncode,
        tail=tail,
    )
