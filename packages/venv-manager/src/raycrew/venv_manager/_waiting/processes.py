"""Which processes of this machine run from a folder, as far as the process table tells."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_SKEW_S = 60.0  # between the clocks of this machine and of the one that keeps the files
_KERNEL_THREAD = 0x00200000  # among the flags in /proc/PID/stat
# What a login runs beside its shell; it hides from its own user, and goes by a title instead of a path.
_LOGIN = frozenset({"(sd-pam)", "login", "ssh-agent", "sshd", "sshd-session", "su", "sudo"})


@dataclass(frozen=True, slots=True)
class Users:
    """The processes that run from a folder.

    Attributes:
        seen: Started from there, working there, or with a library from there loaded.
        hidden: Not to be looked into by this user; nothing says that they do not run from there.
    """

    seen: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.seen or self.hidden)

    def __str__(self) -> str:
        parts = [f"process {', '.join(map(str, self.seen))}"] if self.seen else []
        if self.hidden:
            listed = ", ".join(map(str, self.hidden[:5])) + (", …" if len(self.hidden) > 5 else "")
            parts.append(f"perhaps process {listed}, which this user may not look into")
        return " and ".join(parts)


def processes_using(folder: Path, names: Path | None = None) -> Users:
    """Processes of this machine that run from a folder, or that may do so.

    Args:
        folder: The folder.
        names: Folder of links, by which processes may have been started, too; they may have changed since.
    """
    using = _Using(folder, names)
    answers = {int(p.name): using.by(p) for p in Path("/proc").glob("[0-9]*")}
    return Users(
        tuple(sorted(pid for pid, answer in answers.items() if answer)),
        tuple(sorted(pid for pid, answer in answers.items() if answer is None)),
    )


class _Using:
    """The question of whether processes use one folder."""

    def __init__(self, folder: Path, names: Path | None) -> None:
        self.roots = {f"{folder}{os.sep}", f"{os.path.realpath(folder)}{os.sep}"}
        self.names = names
        self.made = _made(folder)

    def by(self, process: Path) -> bool | None:
        """Whether a process does; None where that cannot be known."""
        first = ""
        try:
            words = (process / "cmdline").read_bytes()
            if self._named_in(words):
                return True
            first = os.fsdecode(words.partition(b"\0")[0])
            cwd = os.readlink(process / "cwd")  # noqa: PTH115 - kept as text
            works_there = self._holds(f"{cwd}{os.sep}")
            return works_there or self._started(process, first, cwd) or self._loaded(process)
        except PermissionError:
            return self._hidden(process, first)
        except OSError:  # it has ended
            return False

    def _loaded(self, process: Path) -> bool:
        return self._named_in((process / "maps").read_bytes())

    def _named_in(self, content: bytes) -> bool:
        return any(os.fsencode(root) in content for root in self.roots)

    def _holds(self, path: str) -> bool:
        return any(path.startswith(root) for root in self.roots)

    def _started(self, process: Path, first: str, cwd: str = "") -> bool:
        """Whether the path that a process was started by leads, or may have led, into the folder."""
        if os.sep not in first:
            return False
        folder, _ = os.path.split(os.path.join(cwd, first))  # noqa: PTH118
        return self._holds(f"{os.path.realpath(folder)}{os.sep}") or self._led_elsewhere(process, folder)

    def _led_elsewhere(self, process: Path, folder: str) -> bool:
        """Whether it was started by one of the names, which may have been another's then."""
        if self.names is None or not Path(folder).is_relative_to(self.names):
            return False
        link = self.names / Path(folder).relative_to(self.names).parts[0]
        try:
            return link.lstat().st_mtime > _start_of(process) - 1.0
        except OSError:
            return True

    def _hidden(self, process: Path, first: str) -> bool | None:
        """What the few facts say that everybody may read."""
        try:
            name, state, flags = _facts(process)
            if state == "Z" or flags & _KERNEL_THREAD or _start_of(process) < self.made - _SKEW_S:
                return False
        except PermissionError:
            return None
        except OSError:  # it has ended
            return False
        if self._started(process, first):
            return True
        return False if first.startswith(os.sep) or name in _LOGIN else None


def _made(folder: Path) -> float:
    """When an environment began to be; 0 if that is not known."""
    try:
        return (folder / "venv" / "pyvenv.cfg").stat().st_mtime
    except OSError:
        return 0.0


def _facts(process: Path) -> tuple[str, str, int]:
    """Name, state and flags of a process."""
    name, rest = _stat_of(process)
    return name, rest[0], int(rest[6])


def _start_of(process: Path) -> float:
    """When a process was started, in seconds since the epoch."""
    return _boot() + int(_stat_of(process)[1][19]) / os.sysconf("SC_CLK_TCK")


@lru_cache(maxsize=1)
def _boot() -> int:
    with open("/proc/stat", encoding="utf-8") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith("btime "))


def _stat_of(process: Path) -> tuple[str, list[str]]:
    before, _, after = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    return before.partition("(")[2], after.split()
