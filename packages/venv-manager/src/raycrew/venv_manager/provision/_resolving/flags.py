"""What a spec says of a project, as flags of uv: interpreter, lock, extras, groups."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from raycrew.venv_manager._spec import EnvironmentSpec, read_toml
from raycrew.venv_manager.errors import ConflictingExtrasError, ResolutionError


def python_flags(spec: EnvironmentSpec) -> tuple[str, str]:
    """Which interpreter uv chooses versions for."""
    return "--python", spec.python or sys.executable


def lock_flag(spec: EnvironmentSpec) -> str:
    """Whether the lock file must fit the project."""
    return "--frozen" if spec.frozen else "--locked"


def export_flags(spec: EnvironmentSpec) -> Iterator[str]:
    """Extras, groups and the member of a workspace."""
    if spec.extras == ("*",):
        yield "--all-extras"
    else:
        for name in spec.extras:
            yield from ("--extra", name)
    for name in spec.no_extras:
        yield from ("--no-extra", name)
    if spec.groups == ("*",):
        yield "--all-groups"
    else:
        for name in spec.groups:
            yield from ("--only-group" if spec.only_groups else "--group", name)
    for name in spec.no_groups:
        yield from ("--no-group", name)
    if not spec.default_groups:
        yield "--no-default-groups"
    if spec.package:
        yield from ("--package", spec.package)


def chosen_names(
    what: str,
    asked: tuple[str, ...],
    refused: tuple[str, ...],
    defined: Mapping[str, Any],
    default: tuple[str, ...] | list[str],
    file: Path,
) -> list[str]:
    """The extras or groups that are installed, as the project writes them.

    Raises:
        ResolutionError: One is not defined.
    """
    by_name = {canonicalize_name(name): name for name in defined}
    names = list(by_name) if asked == ("*",) else [canonicalize_name(name) for name in asked]
    if unknown := [name for name in names if name not in by_name]:
        raise ResolutionError(
            f"{file} defines no {what} {', '.join(unknown)}; it defines {', '.join(by_name) or 'none'}"
        )
    names += [canonicalize_name(name) for name in default]
    left_out = {canonicalize_name(name) for name in refused}
    return [by_name[name] for name in dict.fromkeys(names) if name not in left_out]


def refuse_conflicts(
    declared: list[list[dict[str, str]]], chosen: Mapping[str, list[str]], file: Path
) -> None:
    """What uv itself does where it has a lock file.

    Raises:
        ConflictingExtrasError: Some were asked for together.
    """
    name = canonicalize_name(read_toml(file).get("project", {}).get("name", ""))
    there = {(kind, canonicalize_name(n)) for kind, names in chosen.items() for n in names}
    for items in declared:
        mine = [i for i in items if canonicalize_name(i.get("package", name)) == name]
        asked = [
            f"{k} {i[k]}" for i in mine for k in chosen if k in i and (k, canonicalize_name(i[k])) in there
        ]
        if len(asked) > 1:
            raise ConflictingExtrasError(
                f"{file} declares {' and '.join(asked)} as conflicting; make them two environments"
            )
