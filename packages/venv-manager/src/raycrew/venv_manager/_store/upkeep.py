"""What drifted in an environment, and which environments nobody needs any more."""

import json
import re
import shutil
import time
from collections.abc import Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from raycrew.venv_manager._spec import KEY_LENGTH, need_several
from raycrew.venv_manager._store import building, records
from raycrew.venv_manager._store.building import Expectation, check, probe
from raycrew.venv_manager._store.shelf import NAMES
from raycrew.venv_manager._store.stamps import STAMP, Environment
from raycrew.venv_manager._store.store import Store
from raycrew.venv_manager.errors import (
    ProbeError,
    SpecError,
    StoreError,
    StoreTimeoutError,
    UntrustedStoreError,
)

_DAY_S = 86400.0
_ENTRY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")  # nothing else of a folder is ours, whatever it is
_TRASH = re.compile(rf"{_ENTRY.pattern}-[0-9a-f]{{8}}")


@dataclass(frozen=True, slots=True)
class Drift:
    """How an environment differs from what was published.

    Attributes:
        key: The environment.
        added: Files that came later.
        removed: Files that are gone.
        changed: Files of another size, time or (when asked for) content.
        packages: Distribution to "old -> new".
        notes: What else is wrong: the interpreter fails, Ray does not fit, the project is no longer there.
        broken: Whether one of the notes says that the environment does not work.
    """

    key: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    broken: bool = False

    @property
    def ok(self) -> bool:
        """Whether the environment is what was published, and works."""
        return not (self.added or self.removed or self.changed or self.packages or self.broken)


def verify(store: Store, environment: Environment, *, contents: bool = False, imports: bool = True) -> Drift:
    """Compare an environment with its inventory, and probe its interpreter.

    Args:
        store: The store that it lies in.
        environment: Which one.
        contents: Read every file and compare with the packages' own checksums, too.
        imports: Start the interpreter and import what was imported when it was published.
    """
    root = environment.path / "venv"
    try:
        before = json.loads((environment.path / "inventory.json").read_text(encoding="utf-8"))
        now = building.take(root)
    except (OSError, ValueError) as error:
        return Drift(environment.key, notes=(f"it cannot be compared: {error}",), broken=True)
    changed = {name for name, facts in now.files.items() if name in before and before[name] != list(facts)}
    if contents:
        changed |= set(building.altered(root, now))
    notes, broken = _notes(store, environment, imports)
    old = dict(environment.stamp["packages"])
    return Drift(
        environment.key,
        added=tuple(sorted(now.files.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - now.files.keys())),
        changed=tuple(sorted(changed)),
        packages={
            name: f"{old.get(name, 'absent')} -> {now.packages.get(name, 'absent')}"
            for name in sorted({*old, *now.packages})
            if old.get(name) != now.packages.get(name)
        },
        notes=tuple(notes),
        broken=broken,
    )


def _notes(store: Store, environment: Environment, imports: bool) -> tuple[list[str], bool]:
    notes, broken = [], False
    if environment.built_at is not None:
        notes.append(f"it was moved from {environment.built_at}: programs in its bin folder do not start")
        broken = True
    if (moved := relocated(environment)) is not None:
        notes.append(moved)
    if imports:
        expected = Expectation.from_list(environment.stamp.get("expectation", (None, None, {}, ())))
        try:
            check(probe(environment.python, expected.imports, environ=store.environ), expected)
        except ProbeError as error:
            notes.append(str(error))
            broken = True
    return notes, broken


def relocated(environment: Environment) -> str | None:
    """A note where the checkout that an environment was made from is no longer there; it still works."""
    path = environment.stamp["spec"].get("path")
    if not path or Path(path).exists():
        return None
    return f"its {environment.stamp['spec']['kind']} is no longer at {path}; a copy finds it by content"


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing that was, or would be, taken out of a store.

    Attributes:
        name: Key of the environment, or name of a left-over folder.
        reason: Why it goes, or why it stays.
        freed_bytes: What its removal gives back; files that are shared with others do not count.
        removed: Whether it is gone.
    """

    name: str
    reason: str
    freed_bytes: int
    removed: bool


def collect(
    store: Store,
    *,
    older_than_days: float | None = None,
    max_bytes: int | None = None,
    keep: Collection[str] = (),
    dry_run: bool = False,
    ignore_hidden: bool = False,
) -> list[Removal]:
    """Remove what crashed builds left, then environments by age, then by size, the longest unused first.

    Versions and wheels of local sources that nobody asked for go by age, too. Environments that their
    specification no longer comes to are named, and stay as long as others.

    What a process uses is never removed: one that asked for it and still lives (on any machine that shares
    the store's locks), or one of this machine that runs from it, by whatever name it was started. A process
    that this user may not look into, and of which nothing else tells that it does not, counts as one.

    Args:
        store: The store.
        older_than_days: Environments that nobody asked for in so many days go.
        max_bytes: Environments go until the rest own no more than this.
        keep: Keys or names that stay.
        dry_run: Only say what would go.
        ignore_hidden: Processes that this user may not look into do not count.

    Raises:
        SpecError: A number of days or bytes is below zero, or none.
        TypeError: One name is given where several are meant.
    """
    for number, what in ((older_than_days, "days"), (max_bytes, "bytes")):
        if number is not None and not number >= 0:
            raise SpecError(f"{number} is no number of {what}")
    need_several("keep", keep)
    store.check()
    removed = _left_overs(store, dry_run, ignore_hidden)
    named = {link.name: _named_by(link) for link in store.root.glob(f"{NAMES}/*")}
    kept = {named.get(name, name) for name in keep}
    rows = [(store.locks(e.key).last_used(), e) for e in store.environments()]
    total = sum(int(e.stamp["own_bytes"]) for _, e in rows)
    for last_used, environment in sorted(rows, key=lambda row: row[0]):
        days = (time.time() - last_used) / _DAY_S
        if older_than_days is not None and days >= older_than_days:
            reason = f"unused for {days:.0f} days"
        elif max_bytes is not None and total > max_bytes:
            reason = f"{total / 1e6:.0f} MB are more than {max_bytes / 1e6:.0f} MB"
        else:
            continue
        done = (
            Removal(environment.key, "kept by name", 0, False)
            if environment.key in kept
            else _remove(store, environment, last_used, reason, dry_run, ignore_hidden)
        )
        total -= done.freed_bytes
        removed.append(done)
    if older_than_days is not None:
        removed += _old_records(store, older_than_days, dry_run)
    if not dry_run:
        _unlink_names(store)
    return removed + _offers(store, {row.name for row in removed})


def superseded(store: Store) -> dict[str, str]:
    """Environments to those that the same specification comes to now."""
    now: dict[str, str] = {}
    found = {}
    for environment in sorted(store.environments(), key=lambda e: -store.locks(e.key).last_used()):
        current = now.setdefault(environment.stamp["label"], environment.key)
        if current != environment.key:
            found[environment.key] = current
    return found


def _offers(store: Store, known: Collection[str]) -> list[Removal]:
    """What nothing asks for any more as it is, and an age would take away."""
    return [
        Removal(
            key,
            f"superseded by {current[:8]}, unused for {_days(store, key):.1f} days: an age takes it away",
            0,
            False,
        )
        for key, current in superseded(store).items()
        if key not in known
    ]


def _days(store: Store, key: str) -> float:
    return (time.time() - store.locks(key).last_used()) / _DAY_S


def _old_records(store: Store, days: float, dry_run: bool) -> list[Removal]:
    found = []
    for file in records.unused_since(store, days):
        with suppress(FileNotFoundError):
            size = records.size_of(file)
            if not dry_run:
                records.remove(file)
            found.append(Removal(file.stem, f"unused for {days:g} days", size, not dry_run))
    return found


def _remove(
    store: Store, environment: Environment, last_used: float, reason: str, dry_run: bool, ignore_hidden: bool
) -> Removal:
    key, size = environment.key, int(environment.stamp["own_bytes"])
    locks = store.locks(key)
    try:
        with locks.building(0.0), locks.unused() as free:
            if by := _used_by(store, key, free, ignore_hidden):
                return Removal(key, by, 0, False)
            if store.look(key) is None:
                return Removal(key, "removed by another process", 0, False)
            if locks.last_used() != last_used:
                return Removal(key, "used meanwhile", 0, False)
            if not dry_run:
                store.remove_folder(environment.path)
                store.forget(key)
            return Removal(key, reason, size, not dry_run)
    except StoreTimeoutError:
        return Removal(key, "being built", 0, False)
    except OSError as error:  # another user's, for example
        return Removal(key, f"cannot be removed: {error}", 0, False)


def _used_by(store: Store, key: str, free: bool, ignore_hidden: bool) -> str:
    """What says that an environment is in use; nothing where it is not."""
    if not free:
        return "in use by a process that asked for it"
    users = store.users(store.root / key)
    return f"in use by {users}" if users.seen or (users.hidden and not ignore_hidden) else ""


def _left_overs(store: Store, dry_run: bool, ignore_hidden: bool) -> list[Removal]:
    found = []
    for folder in sorted(store.root.glob("trash/*")):
        if not _TRASH.fullmatch(folder.name):
            continue
        with suppress(FileNotFoundError):  # whoever takes it away at this moment says so
            size = building.take(folder).own_bytes
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
            found.append(Removal(folder.name, "left by an interrupted removal", size, not dry_run))
    for folder in sorted(store.root.iterdir() if store.root.is_dir() else ()):
        if _is_left_over(store, folder):
            found += _remove_left_over(store, folder, dry_run, ignore_hidden)
    return found


def _is_left_over(store: Store, folder: Path) -> bool:
    if not _ENTRY.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return store.look(folder.name) is None
    except UntrustedStoreError:  # which nobody touches
        return False


def _remove_left_over(store: Store, folder: Path, dry_run: bool, ignore_hidden: bool) -> list[Removal]:
    locks = store.locks(folder.name)
    reason = "its stamp is damaged" if (folder / STAMP).exists() else "left by an interrupted build"
    try:
        with locks.building(0.0), locks.unused() as free:
            if not _is_left_over(store, folder):
                return []
            if by := _used_by(store, folder.name, free, ignore_hidden):
                return [Removal(folder.name, by, 0, False)]
            size = building.take(folder).own_bytes
            if not dry_run:
                store.remove_folder(folder)
            return [Removal(folder.name, reason, size, not dry_run)]
    except StoreTimeoutError:
        return []


def _unlink_names(store: Store) -> None:
    """Names of what is gone; of what is built anew at this moment, or cannot be locked, they stay."""
    for link in store.root.glob(f"{NAMES}/*"):
        if not link.exists():
            key = _named_by(link)
            alone = store.locks(key).building(0.0) if _ENTRY.fullmatch(key) else nullcontext()
            with suppress(StoreError), alone:
                if not link.exists():
                    link.unlink(missing_ok=True)


def _named_by(link: Path) -> str:
    """The key of a named environment; "" where it is gone by now, or is no name."""
    try:
        return link.readlink().parent.name
    except OSError:
        return ""
