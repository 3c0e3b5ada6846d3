"""What the command line does; each command returns what it found and an exit code."""

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from raycrew.venv_manager import _spec
from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._store import (
    Environment,
    Removal,
    Store,
    check_name,
    collect,
    luggage,
    relocated,
    superseded,
    verify,
)
from raycrew.venv_manager._uv import (
    PLACES,
    configuration_files,
    configured,
    find_uv,
    index_variables,
    parse,
    run_uv,
    serving,
    uv_version,
)
from raycrew.venv_manager.errors import SpecError, VenvError
from raycrew.venv_manager.provision import ensure, identity_of, prefetch

OK, PROBLEM, USAGE, INTERRUPTED = 0, 1, 2, 130
_BYTECODE = {
    True: "compiled at build: slower builds, faster first imports (UV_COMPILE_BYTECODE=0: the other way)",
    False: "not compiled: faster builds, and each process compiles what it is the first to import",
}
_LINKS = {
    "clone": "environments share the cache's space, until a file is changed",
    "copy": "each environment takes its full size, and longer to build",
    "hardlink": "environments share the cache's space",
    "symlink": "environments share the cache's space, and break when it is cleaned",
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command found.

    Attributes:
        data: For programs (`--json`).
        shown: For people.
        code: Exit code.
    """

    data: Any
    shown: RenderableType
    code: int = OK


def run_ensure(
    store: Store,
    specs: Sequence[str],
    name: str | None,
    *,
    packages: Sequence[str] = (),
    force: bool,
    upgrade: bool = False,
) -> Outcome:
    """Build environments where they are not there; `packages` are installed in each, or make one alone."""
    if name is not None:
        check_name(name)
        if len(specs) > 1:
            raise SpecError(f"{len(specs)} environments cannot all be named {name!r}")
    rows = []
    for wanted in _wanted(specs, packages):
        environment = ensure(wanted, store=store, force_rebuild=force, upgrade=upgrade)
        if name:
            store.name(name, environment.key)
        rows.append(_row(store, environment))
    return Outcome(rows, "\n".join(row["python"] for row in rows))


def _wanted(specs: Sequence[str], packages: Sequence[str]) -> list[EnvironmentSpec]:
    if not specs and not packages:
        raise SpecError("nothing was asked for: name a spec, or requirements with --with")
    if not specs:
        return [EnvironmentSpec.requirements(packages)]
    parsed = [parse(text) for text in specs]
    return [replace(one, packages=(*one.packages, *packages)) for one in parsed] if packages else parsed


def run_list(store: Store) -> Outcome:
    """All environments of the store."""
    newer = superseded(store)
    rows = [_row(store, e, newer.get(e.key)) for e in store.environments()]
    table = Table(title=escape(str(store.root)))
    for column in ("key", "made from", "python", "size", "own (links)", "built in", "created", "last used"):
        table.add_column(column, overflow="fold", min_width=20 if column == "made from" else None)
    for row in rows:
        made_from = escape("\n".join(filter(None, (row["label"], row["note"]))))
        table.add_row(
            row["key"][:8], made_from, row["version"], _megabytes(row["size_bytes"]),
            f"{_megabytes(row['own_bytes'])} ({row['link_mode']})", f"{sum(row['seconds'].values()):.1f} s",
            row["created"][:10], (row["last_used"] or "")[:10],
        )  # fmt: skip
    return Outcome(rows, table)


def _row(store: Store, environment: Environment, newer: str | None = None) -> dict[str, Any]:
    stamp = environment.stamp
    found = {"key": environment.key, "python": str(environment.python), "version": stamp["python"]}
    kept = ("label", "created", "size_bytes", "own_bytes", "link_mode", "seconds")
    used = store.locks(environment.key).last_used()
    moment = datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds") if used else None
    note = relocated(environment) or (f"superseded by {newer[:8]}" if newer else None)
    return found | {name: stamp[name] for name in kept} | {"last_used": moment, "note": note}


def run_verify(store: Store, names: Sequence[str], *, contents: bool, imports: bool) -> Outcome:
    """Compare environments with what was published."""
    chosen = [_find(store, name) for name in names] or store.environments()
    drifts = [verify(store, e, contents=contents, imports=imports) for e in chosen]
    lines = []
    for drift in drifts:
        lines.append(f"{drift.key[:8]} " + ("[green]as published[/]" if drift.ok else "[bold red]drifted[/]"))
        lines += [f"  {escape(f'{name} {change}')}" for name, change in drift.packages.items()]
        for label in ("added", "removed", "changed"):
            files = getattr(drift, label)
            lines += [f"  {label}: {escape(name)}" for name in files[:10]]
            lines += [f"  {label}: {len(files) - 10} more"] if len(files) > 10 else []
        lines += [f"  {escape(note)}" for note in drift.notes]
    code = OK if all(d.ok for d in drifts) else PROBLEM
    return Outcome([asdict(d) | {"ok": d.ok} for d in drifts], "\n".join(lines) or "no environments", code)


def _find(store: Store, name: str) -> Environment:
    link = store.root / "by-name" / name
    matches = [e for e in store.environments() if e.key.startswith(name)]
    if link.is_symlink():
        matches = [e for e in store.environments() if e.key == link.resolve().parent.name]
    if len(matches) != 1:
        raise SpecError(f"{name!r} names {len(matches)} environments of {store.root}; `list` shows them")
    return matches[0]


def run_gc(
    store: Store,
    days: float | None,
    max_size: str | None,
    keep: Sequence[str],
    *,
    dry_run: bool,
    ignore_hidden: bool,
) -> Outcome:
    """Remove what nobody needs."""
    limit = size_in_bytes(max_size) if max_size is not None else None
    kept = [_find(store, name).key for name in keep]
    rows = collect(
        store, older_than_days=days, max_bytes=limit, keep=kept, dry_run=dry_run, ignore_hidden=ignore_hidden
    )
    freed = sum(r.freed_bytes for r in rows)
    lines = [f"{_verdict(r, dry_run)} {escape(r.name)} ({escape(r.reason)})" for r in rows]
    total = f"{_megabytes(freed)} {'would be' if dry_run else 'are'} free"
    return Outcome({"removals": [asdict(r) for r in rows], "freed_bytes": freed}, "\n".join([*lines, total]))


def _verdict(removal: Removal, dry_run: bool) -> str:
    if removal.removed:
        return "removed"
    return "would remove" if dry_run and removal.freed_bytes else "kept"


def size_in_bytes(text: str) -> int:
    """`20G`, `500M`, `1000` as bytes.

    Raises:
        SpecError: It is no size.
    """
    number, unit = text.strip().upper().removesuffix("B"), ""
    if number and number[-1] in "KMGT":
        number, unit = number[:-1], number[-1]
    try:
        size_bytes = int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        size_bytes = -1
    if size_bytes < 0:
        raise SpecError(f"{text!r} is no size; write 20G, 500M or a number of bytes")
    return size_bytes


def run_prefetch(store: Store, names: Sequence[str], modules: Sequence[str], max_builds: int) -> Outcome:
    """Build all registered environments."""
    if max_builds < 1:
        raise SpecError(f"--max-builds is {max_builds}: at least one environment is built at a time")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise SpecError(f"`import {module}` fails: {type(error).__name__}: {error}") from error
    found = prefetch(store=store, names=names, max_builds=max_builds)
    lines = [f"{escape(fqn)} {escape(python)}" for fqn, python in found.items()]
    return Outcome(found, "\n".join(lines) or "no environments are registered")


def run_explain(store: Store, one: str, other: str) -> Outcome:
    """What tells two specs, or two environments of the store, apart."""
    found = [_identity(store, text) for text in (one, other)]
    both = found[0].keys() & found[1].keys()  # of a spec nobody may have asked for yet, less is known
    lines = _spec.explain(*({name: known[name] for name in both} for known in found))
    return Outcome(lines, escape("\n".join(lines) or "the same environment"), PROBLEM if lines else OK)


def _identity(store: Store, text: str) -> dict[str, Any]:
    try:
        return dict(_find(store, text).stamp["identity"])
    except SpecError:
        return identity_of(parse(text), store)


def run_doctor(store: Store) -> Outcome:
    """Whether environments can be built here, and with what."""
    rows: list[tuple[str, str, bool]] = [("python", f"{sys.executable} {sys.version.split()[0]}", True)]
    rows.append(_uv_row(store))
    rows += _store_rows(store)
    carried = luggage()
    rows.append(("ray", carried.ray or "none: environments get none either", True))
    rows.append(
        ("raycrew", ", ".join(f"{c.name} {c.version}" for c in carried.distributions) or "none", True)
    )
    rows += _index_rows(store)
    compiled = store.environ.get("UV_COMPILE_BYTECODE", "1") not in ("0", "false")
    rows.append(("bytecode", _BYTECODE[compiled], True))
    if mode := store.environ.get("UV_LINK_MODE"):
        rows.append(("link mode", f"{mode}: {_LINKS.get(mode, 'which uv does not know')}", mode in _LINKS))
    table = Table(show_header=False)
    for label, value, good in rows:
        table.add_row(label, escape(value), "" if good else "[bold red]problem[/]")
    data = [{"what": label, "found": value, "ok": good} for label, value, good in rows]
    return Outcome(data, table, OK if all(good for *_, good in rows) else PROBLEM)


def _index_rows(store: Store) -> list[tuple[str, str, bool]]:
    """Each place that packages come from, in the order in which uv asks them, and what else uv is told."""
    try:
        found = serving(store.environ)
    except VenvError as error:
        return [("indexes", str(error), False)]
    rows = [(f"index {i}", str(place), True) for i, place in enumerate(found, 1)]
    spec = EnvironmentSpec.requirements(["any"])
    if strategy := index_variables(spec, store.environ).get("UV_INDEX_STRATEGY"):
        rows.append(("UV_INDEX_STRATEGY", strategy, True))
    rows += [("uv.toml", str(path), True) for path in configuration_files(store.environ)]
    told = _spec.counted_settings(configured(store.environ), spec)
    return rows + [(f"uv.toml: {name}", value, True) for name, value in told.items() if name not in PLACES]


def _uv_row(store: Store) -> tuple[str, str, bool]:
    try:
        return "uv", f"{find_uv(store.environ)} {uv_version(store.environ)}", True
    except VenvError as error:
        return "uv", str(error), False


def _store_rows(store: Store) -> list[tuple[str, str, bool]]:
    there = next(p for p in (store.root, *store.root.parents) if p.exists())
    if not there.is_dir():
        return [("store", f"{store.root} cannot be made: {there} is no folder", False)]
    try:
        store.check()
    except VenvError as error:
        return [("store", str(error), False)]
    writable = os.access(there, os.W_OK)
    free = shutil.disk_usage(there).free
    rows = [
        ("store", f"{store.root}, {_megabytes(free)} free" + ("" if writable else ", read-only"), True),
        ("environments", str(len(store.environments())), True),
    ]
    try:
        cache = Path(run_uv(["cache", "dir"], environ=store.environ, timeout_s=60).strip())
    except VenvError:
        return rows
    cached = next(p for p in (cache, *cache.parents) if p.exists())
    same = cached.stat().st_dev == there.stat().st_dev
    advice = "on the store's file system: files are linked" if same else (
        "on another file system: files are copied, slower and at full size each time; UV_CACHE_DIR moves it"
    )  # fmt: skip
    return [*rows, ("uv's cache", f"{cache}, {advice}", True)]


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
