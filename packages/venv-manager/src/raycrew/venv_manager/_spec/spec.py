"""What an environment is: a frozen, hashable, printable value."""

import dataclasses
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from raycrew.venv_manager._spec.local import without_credentials
from raycrew.venv_manager._spec.variables import is_credential
from raycrew.venv_manager.errors import SpecError

_SEVERAL = (
    "packages", "requirement_files", "extras", "groups", "no_extras", "no_groups", "indexes", "find_links",
    "environment",
)  # fmt: skip
Kind = Literal["project", "requirements", "script", "pylock", "interpreter"]


@dataclass(frozen=True, slots=True, repr=False)
class EnvironmentSpec:
    """What one environment holds, whatever form it was given in.

    Build one with `project`, `requirements`, `script`, `pylock`, `interpreter` or `parse`. Paths may be texts
    or path objects; one text where several are meant is a `TypeError`.

    Attributes:
        kind: Where the packages are listed.
        path: Absolute path of the project's folder, the file, or the interpreter; empty for a plain list.
        packages: Requirements (PEP 508) that are installed, too; for a plain list all there is.
        requirement_files: Absolute paths of requirements files that are installed, too.
        extras: Extras of the project; `("*",)` for all of them.
        groups: Dependency groups of the project; `("*",)` for all of them.
        no_extras: Extras that are left out of all of them.
        no_groups: Groups that are left out, default groups included.
        default_groups: Whether the project's default groups are installed.
        only_groups: Whether the project and its dependencies are left out and only groups installed.
        package: Member of a workspace, in place of its root.
        locked: The project must have a lock file that fits it.
        frozen: The lock file is taken as it is, even if the project file has changed since.
        python: Version or path of the interpreter; None for the one that runs the driver.
        default_index: URL of the package index; None for what uv or pip is configured with.
        indexes: Further package indexes.
        find_links: Folders or pages with wheels.
        wheelhouse: Folder that holds all wheels: no index is asked then.
        offline: uv works from its cache only.
        carry: Whether the driver's Ray and raycrew come along.
        environment: Variables for the build, as sorted (name, value) pairs.

    Examples:
        >>> spec = EnvironmentSpec.requirements(["vllm==0.11.0"], python="3.12")
        >>> spec.packages, spec.python
        (('vllm==0.11.0',), '3.12')
    """

    kind: Kind
    path: str = ""
    packages: tuple[str, ...] = ()
    requirement_files: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    no_extras: tuple[str, ...] = ()
    no_groups: tuple[str, ...] = ()
    default_groups: bool = True
    only_groups: bool = False
    package: str | None = None
    locked: bool = False
    frozen: bool = False
    python: str | None = None
    default_index: str | None = None
    indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    wheelhouse: str | None = None
    offline: bool = False
    carry: bool = True
    environment: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        for name in _SEVERAL:
            need_several(name, getattr(self, name))
        for name in ("path", "python", "wheelhouse"):
            if isinstance(given := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, _text(given))
        for name in ("packages", "requirement_files", "indexes", "find_links"):
            object.__setattr__(self, name, tuple(map(_text, getattr(self, name))))
        for name in ("packages", "requirement_files", "extras", "groups", "no_extras", "no_groups"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        object.__setattr__(self, "environment", tuple(sorted(self.environment)))
        if not all(map(str.strip, self.packages)):
            raise SpecError("a requirement is empty")
        if self.kind != "project" and (self.extras or self.groups or self.package):
            raise SpecError(f"extras, groups and a package belong to a project, not to a {self.kind}")
        if self.kind in ("requirements", "interpreter") and (self.locked or self.frozen):
            raise SpecError(f"there is no lock file of a {self.kind}")
        if self.locked and self.frozen:
            raise SpecError("--locked and --frozen exclude each other")
        if self.kind == "interpreter" and (self.packages or self.requirement_files):
            raise SpecError(f"nothing is installed into an existing interpreter ({self.path})")
        if self.kind == "requirements" and not (self.packages or self.requirement_files):
            raise SpecError("a list of requirements is empty")

    @classmethod
    def project(cls, folder: str | os.PathLike[str], **options: Any) -> Self:
        """A folder with a `pyproject.toml`, with its lock file where there is one.

        Raises:
            SpecError: There is no project file.
        """
        path = Path(folder).expanduser().resolve()
        if path.name == "pyproject.toml":
            path = path.parent
        if not (path / "pyproject.toml").is_file():
            raise SpecError(f"there is no pyproject.toml in {path}")
        return cls("project", str(path), **_tuples(options))

    @classmethod
    def requirements(cls, listed: str | os.PathLike[str] | Iterable[str], **options: Any) -> Self:
        """A list of requirements, or the path of a requirements file.

        Raises:
            SpecError: The list is empty, or the file is missing.
        """
        options = _tuples(options)
        if isinstance(listed, (str, os.PathLike)):
            options["requirement_files"] = (_file(listed), *options.get("requirement_files", ()))
        else:
            options["packages"] = (*listed, *options.get("packages", ()))
        return cls("requirements", **options)

    @classmethod
    def script(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """A script with inline metadata (PEP 723).

        Raises:
            SpecError: There is no such file, or it has no such metadata.
        """
        found = _file(path)
        if "# /// script" not in Path(found).read_text(encoding="utf-8"):
            raise SpecError(f"{found} has no inline metadata (a block that starts with '# /// script')")
        return cls("script", found, **_tuples(options))

    @classmethod
    def pylock(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """A lock file in the standard format (PEP 751).

        Raises:
            SpecError: There is no such file.
        """
        return cls("pylock", _file(path), **_tuples(options))

    @classmethod
    def interpreter(cls, path: str | os.PathLike[str]) -> Self:
        """An interpreter that exists already; it is probed, never changed."""
        return cls("interpreter", str(Path(path).expanduser().absolute()))

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in some fields."""
        return dataclasses.replace(self, **_tuples(changes))

    def to_dict(self) -> dict[str, Any]:
        """All fields that differ from their defaults, ready for JSON; without user names and passwords."""
        found: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "kind" or value != f.default:
                found[f.name] = _plain(value)
        if self.environment:
            kept = ((k, v) for k, v in self.environment if not is_credential(k))
            found["environment"] = [[k, without_credentials(v)] for k, v in kept]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        values: dict[str, Any] = {
            k: tuple(tuple(i) if isinstance(i, list) else i for i in v) if isinstance(v, list) else v
            for k, v in data.items()
        }
        return cls(**values)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"EnvironmentSpec({fields})"

    def __str__(self) -> str:
        listed = without_credentials(" ".join(self.packages + self.requirement_files))
        words = [self.kind, self.path or listed]
        for name, value in self.to_dict().items():
            if name in ("kind", "path") or (name in ("packages", "requirement_files") and not self.path):
                continue
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{name}={shlex.quote(shown)}")
        return " ".join(words)


def _plain(value: Any) -> Any:
    """A field as JSON has it."""
    if isinstance(value, tuple):
        return [list(v) if isinstance(v, tuple) else _plain(v) for v in value]
    return without_credentials(value) if isinstance(value, str) else value


def need_several(what: str, given: object) -> None:
    """Refuse one text where several are meant: its letters would be taken for them.

    Raises:
        TypeError: It is one.
    """
    if isinstance(given, (str, bytes, os.PathLike)):
        raise TypeError(f"{what} is {given!r}; several are expected, as in [{given!r}]")


def _text(given: str | os.PathLike[str]) -> str:
    return str(Path(given).absolute()) if isinstance(given, os.PathLike) else given


def _file(path: str | os.PathLike[str]) -> str:
    found = Path(path).expanduser().resolve()
    if not found.is_file():
        raise SpecError(f"there is no file {found}")
    return str(found)


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with sequences as tuples and mappings as pairs, so that the spec can be hashed."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found[name] = tuple(sorted(value.items()))
        else:
            found[name] = value if isinstance(value, (str, bool, type(None), os.PathLike)) else tuple(value)
    return found
