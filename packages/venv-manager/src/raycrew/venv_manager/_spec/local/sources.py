"""Where a project's own sources lie: itself, its workspace, and the local folders and files that it names."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from raycrew.venv_manager._spec.local.listed import local_requirement, required_name
from raycrew.venv_manager.errors import SpecError, fault_of

_Named = tuple[str | None, Path]  # as what it is required, and where it lies
# Keys by which project files of build backends name code of the project's own, and files that are such code.
_HOOKS = frozenset({"hooks", "custom-hook", "cmdclass"})
_BUILD_CODE = ("setup.py", "pdm_build.py")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict, which later calls share: not to be changed.

    Raises:
        SpecError: It cannot be read.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {fault_of(error)}") from None


@lru_cache(maxsize=256)
def _parse(text: str) -> dict[str, Any]:
    """Files are asked for several times on the way to an environment; equal text is parsed once."""
    return tomllib.loads(text)


def workspace_root(project: Path) -> Path:
    """The folder whose lock file and settings a project uses: its workspace's, else its own."""
    for folder in (project, *project.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and "workspace" in read_toml(file).get("tool", {}).get("uv", {}):
            return folder if project == folder or _is_member(folder, project) else project
    return project


def _is_member(root: Path, project: Path) -> bool:
    """Whether a folder is a member of a workspace, without a look at the others where that can be told so."""
    workspace = read_toml(root / "pyproject.toml")["tool"]["uv"]["workspace"]
    patterns = (*workspace.get("members", ()), *workspace.get("exclude", ()))
    if any("**" in pattern or ".." in pattern for pattern in patterns):
        return project in _members(root)
    parts = project.relative_to(root).parts
    return _is_one(parts, workspace.get("members", ())) and not _is_one(parts, workspace.get("exclude", ()))


def _is_one(parts: tuple[str, ...], patterns: Iterable[str]) -> bool:
    ways = (Path(pattern).parts for pattern in patterns)
    return any(len(way) == len(parts) and all(map(fnmatchcase, parts, way)) for way in ways)


def is_package(project: dict[str, Any]) -> bool:
    """Whether uv would install the project itself and not only its dependencies."""
    declared = project.get("tool", {}).get("uv", {}).get("package")
    return bool(declared) if declared is not None else "build-system" in project


def local_sources(project: Path) -> list[Path]:
    """All local folders and files that a project is made of: itself, its path sources, and theirs in turn."""
    found = with_theirs([project])
    return found if is_package(_project_file(project)) else found[1:]


def with_theirs(sources: Iterable[Path]) -> list[Path]:
    """Local folders and files, with those that their project files name, and these in turn.

    Their order is that of the project files, wherever these lie.
    """
    return list(_with_theirs((None, path) for path in sources))


def _with_theirs(sources: Iterable[_Named]) -> dict[Path, set[str]]:
    """The same, each with the canonical names that it is required by."""
    found: dict[Path, set[str]] = {}
    waiting = list(sources)[::-1]
    while waiting:
        name, path = waiting.pop()
        if path not in found:
            found[path] = set()
            waiting += _named(path)
        if name is not None:
            found[path].add(canonicalize_name(name))
    return found


def _project_file(folder: Path) -> dict[str, Any]:
    file = folder / "pyproject.toml"
    return read_toml(file) if file.is_file() else {}


def _named(folder: Path) -> Iterator[_Named]:
    """What a project file names: own sources, those that its workspace gives it, direct references."""
    data = _project_file(folder)
    if not data:
        return
    texts = list(_requirements(data))
    yield from _direct(texts, folder)
    root = workspace_root(folder)
    sources = data.get("tool", {}).get("uv", {}).get("sources", {})
    yield from sources_named(sources, folder)
    if root != folder:
        given = _project_file(root).get("tool", {}).get("uv", {}).get("sources", {})
        needed = {required_name(text) for text in texts} - {canonicalize_name(name) for name in sources}
        unsaid = not {"dependencies", "optional-dependencies"}.isdisjoint(
            data.get("project", {}).get("dynamic", ())
        )
        mine = {name: s for name, s in given.items() if unsaid or canonicalize_name(name) in needed}
        yield from sources_named(mine, root)


def _direct(texts: Iterable[str], folder: Path) -> Iterator[_Named]:
    for text in texts:
        if (path := local_requirement(text, folder)) is not None:
            yield required_name(text), path


def build_sources(folder: Path, more: Iterable[str] = ()) -> dict[Path, set[str]]:
    """The local folders and files that a source is built with, and theirs in turn, with their names.

    Args:
        folder: The source.
        more: What its consumer says that its build requires, too.
    """
    data = _project_file(folder)
    texts = [*data.get("build-system", {}).get("requires", ()), *more]
    direct = list(_direct(texts, folder))
    needed = {required_name(text) for text in texts}
    for base in dict.fromkeys((folder, workspace_root(folder))):
        given = _project_file(base).get("tool", {}).get("uv", {}).get("sources", {})
        named = {name: source for name, source in given.items() if canonicalize_name(name) in needed}
        direct += sources_named(named, base)
    return _with_theirs(direct)


def has_build_code(folder: Path) -> bool:
    """Whether code of a source's own takes part in its build: that may read any of its files."""
    data, hatch = _project_file(folder), folder / "hatch.toml"
    tool = data.get("tool", {})
    return (
        any((folder / name).exists() for name in _BUILD_CODE)
        or "backend-path" in data.get("build-system", {})
        or "build" in tool.get("poetry", {})
        or not _HOOKS.isdisjoint(_keys([tool, read_toml(hatch) if hatch.is_file() else {}]))
    )


def _keys(tables: Any) -> Iterator[str]:
    """The keys of tables, and of the tables in these."""
    if isinstance(tables, dict):
        yield from tables
    if isinstance(tables, (dict, list)):
        for table in tables.values() if isinstance(tables, dict) else tables:
            yield from _keys(table)


def sources_named(sources: Mapping[str, Any], base: Path) -> Iterator[_Named]:
    """The local folders and files among the sources that a file names, with their names."""
    given = [
        (name, s) for name, told in sources.items() for s in (told if isinstance(told, list) else [told])
    ]
    members = _members_by_name(base) if any(source.get("workspace") for _, source in given) else {}
    for name, source in given:
        if "path" in source:
            path = (base / source["path"]).resolve()
            if may_count(path, source.get("marker", "")):
                yield name, path
        elif source.get("workspace") and (path := members.get(canonicalize_name(name))):
            yield name, path


def may_count(path: Path, marker: str) -> bool:
    """Whether a source that a file names is read here; one for other machines may lie on those only."""
    return not marker or path.exists()


def _requirements(data: Mapping[str, Any]) -> Iterator[str]:
    """All requirements of a project file, for running and for building it."""
    project, uv = data.get("project", {}), data.get("tool", {}).get("uv", {})
    tables = (project.get("optional-dependencies", {}), data.get("dependency-groups", {}))
    lists = [
        project.get("dependencies", ()), uv.get("dev-dependencies", ()),
        data.get("build-system", {}).get("requires", ()), *(v for table in tables for v in table.values()),
    ]  # fmt: skip
    yield from (text for listed in lists for text in listed if isinstance(text, str))


def _members(root: Path) -> Iterator[Path]:
    workspace = read_toml(root / "pyproject.toml").get("tool", {}).get("uv", {}).get("workspace", {})
    left_out = {p.resolve() for pattern in workspace.get("exclude", ()) for p in root.glob(pattern)}
    for pattern in workspace.get("members", ()):
        for path in sorted(root.glob(pattern)):
            if (path / "pyproject.toml").is_file() and path.resolve() not in left_out:
                yield path.resolve()


def _members_by_name(folder: Path) -> dict[str, Path]:
    root = workspace_root(folder)
    names = (
        (_project_file(path).get("project", {}).get("name", ""), path) for path in (root, *_members(root))
    )
    return {canonicalize_name(name): path for name, path in names}


def member(root: Path, package: str) -> Path:
    """Folder of the workspace member with this name.

    Raises:
        SpecError: There is none.
    """
    names = _members_by_name(root)
    try:
        return names[canonicalize_name(package)]
    except KeyError:
        raise SpecError(
            f"the workspace {root} has no package {package!r}; it has {', '.join(sorted(names))}"
        ) from None
