"""What is left behind: processes, actors, placement groups, shared memory, port leases, locks."""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

RUN = "RAYCREW_CHAOS_RUN"
"""The variable that all processes of a run inherit, and nobody else has: runs don't see each other."""

_TITLE = re.compile(rb"ray::([A-Za-z_]\w*)")
_LEASE = re.compile(r"(\d+) @raycrew-port-(\d+)$", re.MULTILINE)
_OF_RAY = re.compile(r"IDLE.*|SpillWorker|RestoreWorker")  # Ray keeps them for later


@dataclass(frozen=True)
class Look:
    """What there is at some time.

    Attributes:
        orphans: Processes that workers started that are gone, with their command lines.
        actors: How many processes of actors there are, by class.
        others: How many others there are that no worker has started, by command line: nodes', keepers.
        placement_groups: Ids of those that are not removed.
        shared: How many files of shared memory there are.
        leases: How many ports are leased by processes of the run.
        locks: How many locks of files they hold or wait for.
    """

    orphans: tuple[str, ...] = ()
    actors: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    placement_groups: frozenset[str] = frozenset()
    shared: int = 0
    leases: int = 0
    locks: int = 0


def left(before: Look, now: Look) -> tuple[str, ...]:
    """What there is now and was not before; an actor that is missing is no leak, but told as well."""
    classes = sorted(before.actors.keys() | now.actors.keys())
    changed = {name: now.actors.get(name, 0) - before.actors.get(name, 0) for name in classes}
    more = {line: count - before.others.get(line, 0) for line, count in now.others.items()}
    counted = (
        ("files of shared memory", before.shared, now.shared),
        ("port leases", before.leases, now.leases),
        ("locks of files", before.locks, now.locks),
    )
    return (
        *(f"process {orphan}" for orphan in now.orphans if orphan not in before.orphans),
        *(f"actors: {count:+d} {name}" for name, count in changed.items() if count),
        *(f"processes: {count:+d} {line}" for line, count in sorted(more.items()) if count > 0),
        *(f"placement group {one}" for one in sorted(now.placement_groups - before.placement_groups)),
        *(f"{now_ - was} more {what}" for what, was, now_ in counted if now_ > was),
    )


def counted_in(before: Look, now: Look) -> Look:
    """What is expected from now on: what was, and what is left, which was told of the fault that left it."""
    return replace(
        now,
        shared=max(before.shared, now.shared),
        leases=max(before.leases, now.leases),
        locks=max(before.locks, now.locks),
    )


def settled(before: Look, look: Callable[[], Look], timeout_s: float = 30.0) -> tuple[str, ...]:
    """What is left once nothing is, or when time is up: what ends may take a moment."""
    deadline = time.monotonic() + timeout_s
    while found := left(before, look()):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    return found


def orphans_of(marked: Mapping[int, Collection[str]], living: Iterable[int]) -> list[int]:
    """Processes that share no mark with a living worker, of those that carry marks."""
    known = {mark for pid in living for mark in marked.get(pid, ())}
    return [pid for pid, marks in marked.items() if known.isdisjoint(marks)]


def actor_class(command: bytes) -> str:
    """The class of an actor by its process's title; empty if it is none, or a worker that Ray keeps."""
    found = _TITLE.match(command)
    name = found[1].decode() if found else ""
    return "" if _OF_RAY.fullmatch(name) else name


def run_processes(run: str) -> dict[int, bytes]:
    """The processes of a run, with their command lines."""
    return {pid: command for pid, command in _commands() if is_of_run(pid, run)}


def count_actors(commands: Iterable[bytes]) -> dict[str, int]:
    """How many processes of actors there are, by class."""
    return dict(Counter(name for name in map(actor_class, commands) if name))


def leases_of(pids: Iterable[int], table: str = "/proc/net/unix") -> int:
    """How many ports some processes have leased."""
    leased = {found[0] for found in _LEASE.findall(Path(table).read_text())}
    return len({inode for pid in pids for inode in _sockets(pid)} & leased)


def locks_of(pids: Collection[int], table: str = "/proc/locks") -> int:
    """How many locks of files some processes hold or wait for."""
    lines = (line.replace("->", "").split() for line in Path(table).read_text().splitlines())
    return sum(int(words[4]) in pids for words in lines if words[1] == "FLOCK")


def shared_files(folder: Path) -> int:
    """How many files there are below a folder of shared memory."""
    return sum(path.is_file() for path in folder.rglob("*"))


def _commands() -> Iterator[tuple[int, bytes]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - the faster one
        if name.isdecimal():
            with suppress(OSError):
                yield int(name), Path(f"/proc/{name}/cmdline").read_bytes()


def count_others(commands: Mapping[int, bytes], workers: Collection[int]) -> dict[str, int]:
    """How many processes are neither Ray's workers nor come from some, by command line."""
    others = (line for pid, line in commands.items() if pid not in workers and not line.startswith(b"ray::"))
    return dict(Counter(map(shown, others)))


def shown(command: bytes) -> str:
    """How a command line is told."""
    return command.replace(b"\0", b" ").decode(errors="replace").strip()[:120]


def is_of_run(pid: int, run: str) -> bool:
    """Whether a process that lives is of a run."""
    with suppress(OSError):
        return f"{RUN}={run}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _sockets(pid: int) -> Iterator[str]:
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for link in folder.iterdir():
            with suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    yield target[8:-1]
