"""Whose files a store may hold: as ssh has it for keys, what nobody but trusted users may write."""

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from raycrew.venv_manager._spec import need_several
from raycrew.venv_manager._store.building import PYTHON, VENV
from raycrew.venv_manager._store.stamps import STAMP
from raycrew.venv_manager.errors import SpecError, UntrustedStoreError

VARIABLE = "RAYCREW_VENV_TRUSTED_OWNERS"
_LINKS = 40  # in one path; as the kernel has it


@dataclass(frozen=True, slots=True)
class Trust:
    """Users and groups that may write what this user runs: itself, root, and those named.

    Attributes:
        users: Their ids.
        groups: Their ids.
    """

    users: frozenset[int]
    groups: frozenset[int] = frozenset()

    def check_entry(self, entry: Path, root: Path) -> None:
        """See that nobody else can have put anything into an environment, on the way to it, or beside it.

        Raises:
            UntrustedStoreError: Somebody else can.
        """
        self.check_root(root)
        self.check_one(f"{root}/locks", root)
        for part in ("", f"/{STAMP}", f"/{VENV}", f"/{VENV}/bin", f"/{VENV}/pyvenv.cfg", f"/{VENV}/lib"):
            self.check_one(f"{entry}{part}", root)
        for library in _listed(f"{entry}/{VENV}/lib"):
            self.check_one(library, root)
            self.check_one(f"{library}/site-packages", root)
        self.check_one(f"{entry}/{PYTHON}", root, follow=False)  # to the Python that it was made from

    @classmethod
    def of(cls, named: Iterable[str], environ: Mapping[str, str]) -> "Trust":
        """Trust in users and groups (`@team`), by name or number: those given, and those of the variable.

        Raises:
            SpecError: This machine does not know one of them.
        """
        names = {*owners_named(named, environ)}
        groups = {n for n in names if n.startswith("@")}
        users = {_known(n, _user_of) for n in names - groups}
        return cls(
            frozenset({0, os.geteuid(), *users}), frozenset(_known(n, _group_of) for n in groups)
        )  # fmt: skip

    def check_root(self, root: Path) -> None:
        """See that nobody else can put anything into a folder, or replace it; what does not exist is fine.

        It and those above it may be everybody's where nobody can replace another's files, as in `/tmp`.

        Raises:
            UntrustedStoreError: Somebody else can.
        """
        for path, found in _steps(str(root)):
            self._check(path, found, root, sticky_is_fine=True)

    def check_one(self, path: str | Path, root: Path, *, follow: bool = True) -> None:
        """See that a file, a folder or a link in a store is nobody else's; one that does not exist is fine.

        Raises:
            UntrustedStoreError: It is, or others may write it, or what a link leads to.
        """
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        self._check(str(path), found, root, sticky_is_fine=False)
        if follow and stat.S_ISLNK(found.st_mode):
            for step, there in _steps(str(path)):
                self._check(step, there, root, sticky_is_fine=True)

    def _check(self, path: str, found: os.stat_result, root: Path, *, sticky_is_fine: bool) -> None:
        if found.st_uid not in self.users:
            name = _name_of_user(found.st_uid)
            raise _untrusted(
                root, f"{path} belongs to {name}", f"if that user may be trusted: {VARIABLE}={name}"
            )
        mode = found.st_mode
        if stat.S_ISLNK(mode) or (sticky_is_fine and mode & stat.S_ISVTX):
            return
        if mode & stat.S_IWOTH:
            raise _untrusted(root, f"everybody may write {path}", f"`chmod o-w {path}` ends that")
        if mode & stat.S_IWGRP and found.st_gid not in self.groups and not _is_own(found.st_gid):
            name = _name_of_group(found.st_gid)
            advice = f"`chmod g-w {path}` ends that; if that group may be trusted: {VARIABLE}=@{name}"
            raise _untrusted(root, f"the group {name} may write {path}", advice)


def owners_named(named: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those owners, and those of the variable, as they are written.

    Raises:
        TypeError: One is given where several are meant.
    """
    need_several("trusted_owners", named)
    texts = (text.strip() for text in (*named, *environ.get(VARIABLE, "").split(",")))
    return tuple(sorted({text for text in texts if text}))


def _untrusted(root: Path, why: str, advice: str) -> UntrustedStoreError:
    return UntrustedStoreError(
        f"the store {root} is not to be trusted: {why}, and could have planted what would be run; {advice}; "
        "RAYCREW_VENV_DIR names another store"
    )


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each folder and link on the way from the root of the file system, as far as there is one."""
    here, left, links = "/", [*Path(path).parts[:0:-1]], 0
    yield here, os.lstat(here)
    while left:
        name = left.pop()
        if name == os.sep:
            continue
        if name == os.pardir:
            here = os.path.dirname(here)  # noqa: PTH120
            continue
        step = here.rstrip(os.sep) + os.sep + name
        try:
            found = os.lstat(step)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            here = step
            continue
        links += 1
        if links > _LINKS:
            return  # nothing can be opened by such a path
        target = os.readlink(step)  # noqa: PTH115
        here = "/" if target.startswith(os.sep) else here
        left += reversed(Path(target).parts)


def _listed(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]  # noqa: PTH208 - in the hot path of `ensure`
    except FileNotFoundError:
        return []


def _is_own(group: int) -> bool:
    """Whether a group is this user's alone, as many systems give one to each."""
    try:
        me, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return me.pw_gid == group and found.gr_name == me.pw_name and set(found.gr_mem) <= {me.pw_name}


def _user_of(name: str) -> int:
    return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid


def _group_of(name: str) -> int:
    name = name.removeprefix("@")
    return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid


def _known(name: str, find: Callable[[str], int]) -> int:
    try:
        return find(name)
    except KeyError:
        raise SpecError(f"{name} is to be trusted ({VARIABLE}), but this machine does not know it") from None


def _name_of_user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _name_of_group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
