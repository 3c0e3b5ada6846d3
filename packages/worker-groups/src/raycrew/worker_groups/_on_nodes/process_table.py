"""The process table of this node: who runs, who started whom, and the end of exactly one process.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One process and no later one of the same number.

    Attributes:
        pid: Its number.
        started: When it was started, in clock ticks since the node's boot.
    """

    pid: int
    started: int


class Entry(NamedTuple):
    """A running process, as the table shows it; `group` and `session` are numbers of their leaders.

    `ticks` is the CPU time that it and its ended children have used, in clock ticks.
    """

    process: Process
    parent: int
    group: int
    session: int
    state: str = ""
    ticks: int = 0


Table = Mapping[int, Entry]


def read_entry(pid: int | str) -> Entry | None:
    """The process of a number, or None: a zombie holds nothing any more and counts as gone.

    Raises:
        OSError: It can't be told, as where this process has no descriptor left.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, group, session, *rest = stat.rpartition(b")")[2].split()
    threads, started = int(rest[13]), int(rest[15])
    if state in b"ZX" and threads <= 1:  # A zombie with more threads is a process whose first one has ended.
        return None
    process = Process(int(stat.partition(b" ")[0]), started)
    return Entry(process, int(parent), int(group), int(session), state.decode(), sum(map(int, rest[7:11])))


def read_table() -> dict[int, Entry]:
    """All running processes that may be looked at, by number.

    Raises:
        OSError: It can't be told which there are.
    """
    entries = (_entry_if_allowed(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - the faster one
    return {entry.process.pid: entry for entry in entries if entry is not None}


def _entry_if_allowed(pid: str) -> Entry | None:
    try:
        return read_entry(pid)
    except PermissionError:  # another user's, where those are hidden
        return None


def own_process() -> Process:
    """This process, as others on the node know it."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """The process of a number, which may have ended as long as nobody has waited for it.

    Raises:
        OSError: There is none.
    """
    return Process(pid, int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]))


def runs(process: Process) -> bool:
    """Whether a process is there, and not merely a later one of its number."""
    entry = read_entry(process.pid)
    return entry is not None and entry.process == process


def ancestors(pid: int, table: Table) -> frozenset[int]:
    """Numbers of a process's parents, up to the first of all."""
    found: set[int] = set()
    while (entry := table.get(pid)) is not None and entry.parent not in found:
        pid = entry.parent
        found.add(pid)
    return frozenset(found)


def kill(process: Process) -> None:
    """Kill a process, and never a later one of its number; what may not be killed is left."""
    with suppress(OSError):
        send(process, signal.SIGKILL)


def send(process: Process, number: int) -> bool:
    """Send a signal to a process, and never to a later one of its number; False where it is gone.

    Raises:
        OSError: It may not be sent one, or it can't be told now who that is.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # Not in this Python, or kept from it by a sandbox.
        descriptor = -1
    try:
        if is_there := runs(process):  # From here on the descriptor holds it, and nobody else's number.
            _send(process.pid, descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return is_there


def _send(pid: int, descriptor: int, number: int) -> None:
    if descriptor >= 0:
        signal.pidfd_send_signal(descriptor, number)
    else:
        os.kill(pid, number)


def opened(pid: int, name: str, flags: int) -> int | None:
    """A descriptor of a process's memory with a name; None where it has none, or it can't be opened."""
    for folder in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):  # the second for privileged readers only
        try:
            links = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
        except OSError:
            continue
        for link in links:
            with suppress(OSError):
                if os.readlink(f"{folder}/{link}").startswith(name):  # noqa: PTH115 - the faster one
                    return os.open(f"{folder}/{link}", flags | os.O_CLOEXEC)
    return None


def pid_namespace() -> str:
    """What the numbers of this process's table are valid in."""
    return str(Path("/proc/self/ns/pid").readlink())


def clock_name() -> str:
    """What processes that share this one's monotonic clock, and no others, call it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    try:
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:  # a kernel without them
        return boot


def memory_of(pid: int) -> dict[str, int]:
    """The memory of a process, in bytes, by the names of its status; empty if that can't be read."""
    try:
        # Bytes: a process's name may be any, and is cut within a letter where it is too long.
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith((b"RssAnon:", b"VmRSS:")))
    return {name.rstrip(b":").decode(): int(size) * 1024 for name, size, *_ in fields}
