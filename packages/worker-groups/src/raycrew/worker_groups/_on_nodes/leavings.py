"""What a worker leaves in files of its node: its output, and what the recorder of its collectives wrote.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Variables that say where torch's recorder of collective operations writes; a rank's number follows.
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

_TAIL_BYTES = 1 << 20
_RECORD_BYTES = 8 << 20
_OWN_OF_RAY = (":job_id:", ":actor_name:", ":task_name:")  # it marks its files with such lines
_DOUBT_S = 2.0  # times of files and of processes come from clocks that are read apart


def output_paths(pid: int | str = "self") -> tuple[str, ...]:
    """Files that a process's output goes to, which Ray made its standard output and error."""
    paths = []
    for descriptor in (1, 2):
        try:
            path = str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
        except OSError:
            continue
        if path.endswith((".out", ".err", ".log")):
            paths.append(path)
    return tuple(paths)


def read_tail(paths: Sequence[str], lines: int = 20, most_bytes: int = _TAIL_BYTES) -> str:
    """The last lines of some files, one file after the other; what can't be read is left out."""
    return output_of(paths, lines, most_bytes)[0]


def output_of(paths: Sequence[str], lines: int, most_bytes: int = _TAIL_BYTES) -> tuple[str, str]:
    """The last lines of each of some files, one file after the other, and why any of these can't be had.

    Args:
        paths: The files.
        lines: How many of each, empty ones left out.
        most_bytes: How much of each is read.
    """
    found: list[str] = []
    problems = [] if paths else ["its output goes to no file that is known"]
    for path in paths:
        try:
            tail, is_cut = _tail_of(path, most_bytes)
        except OSError as error:
            problems.append(f"{path} can't be read: {error.strerror or error}")
            continue
        found += tail[-lines:]
        if is_cut and len(tail) < lines:
            problems.append(f"only the last {most_bytes} bytes of {path} are read")
    return "\n".join(found), "; ".join(problems)


def _tail_of(path: str, most_bytes: int) -> tuple[list[str], bool]:
    """The last lines of a file, and whether there are more: the one that is cut is told where it is alone."""
    with Path(path).open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - most_bytes))
        text = log.read(most_bytes).decode(errors="replace")
    lines, is_cut = text.splitlines(), size > most_bytes
    whole = lines[1:] if is_cut and len(lines) > 1 else lines
    return [line for line in whole if line and not line.startswith(_OWN_OF_RAY)], is_cut


def record_of(
    rank: int,
    prefixes: Sequence[str],
    started: int,
    environ: Mapping[str, str],
    most_bytes: int = _RECORD_BYTES,
) -> tuple[str, bytes, str]:
    """What torch's recorder of collective operations has written for a rank, as it is.

    Args:
        rank: Which.
        prefixes: Where it may have been told to write.
        started: When the rank's process was started, in clock ticks since boot: older files are another's.
        environ: Variables that may say where, too.
        most_bytes: Above that, and above 8 MiB, it is left where it is.

    Returns:
        The file, what is in it, and why that is not taken; nothing where none was written.
    """
    for prefix in (*prefixes, *_usual_prefixes(environ)):
        path = f"{prefix}{rank}"
        try:
            return _record_at(path, _time_of(started) - _DOUBT_S, min(most_bytes, _RECORD_BYTES))
        except FileNotFoundError:
            continue
        except OSError as error:
            return path, b"", f"{path} can't be read: {error.strerror or error}"
    return "", b"", ""


def _usual_prefixes(environ: Mapping[str, str]) -> list[str]:
    told = [environ[name] for name in RECORDS if environ.get(name)]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"
    return [*told, f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]


def _time_of(started: int) -> float:
    """Clock ticks since boot, in seconds since the epoch."""
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + started / os.sysconf("SC_CLK_TCK")


def _record_at(path: str, not_before: float, most_bytes: int) -> tuple[str, bytes, str]:
    # Others may write into /tmp.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return path, b"", f"{path} is no file of this user's"
        if about.st_mtime < not_before:
            return path, b"", f"{path} is older than the process"
        if about.st_size > most_bytes:
            return path, b"", f"{path} has {about.st_size} bytes, and is left where it is"
        return path, file.read(most_bytes), ""
