"""Requirements files, read as uv reads them: statements, the files that they include, local sources."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from raycrew.venv_manager._spec.local.credentials import without_credentials
from raycrew.venv_manager.errors import SpecError, fault_of

_NO_NAMES: Mapping[Path, str] = MappingProxyType({})
_INCLUDE = re.compile(r"(?P<flag>-r|--requirements?|-c|--constraints?)(?:\s*=\s*|\s*)(?P<path>\S.*)")
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s*=\s*|\s+)")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_OPTIONS = re.compile(r"\s--")
_MARKER = re.compile(r"\s;|;\s")
_FILE_URL = re.compile(r"file:(?://(?:localhost)?(?=/))?")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_EXTRAS = re.compile(r"\[[\w\s.,-]*\]\s*$")


def requirement_lines(file: Path, environ: Mapping[str, str]) -> list[str]:
    """The statements of a requirements file: no comments, `${NAME}` replaced by variables that are set.

    Raises:
        SpecError: It cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} cannot be read: {fault_of(error)}") from None
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines())
    return [_VARIABLE.sub(lambda m: environ.get(m[1], m[0]), line) for line in lines if line]


def requirement_files(file: Path, environ: Mapping[str, str], *, constraints: bool = True) -> list[Path]:
    """A requirements file, and those that it includes, theirs in turn.

    Raises:
        SpecError: One cannot be read.
    """
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop(0)
        if path not in found:
            found[path] = None
            waiting += _included(path, environ, constraints)
    return list(found)


def _included(file: Path, environ: Mapping[str, str], constraints: bool) -> Iterator[Path]:
    for line in requirement_lines(file, environ):
        match = _INCLUDE.fullmatch(line)
        if match is None or not (constraints or match["flag"].lstrip("-")[0] == "r"):
            continue
        path = re.sub(r"\\(.)", r"\1", _unquoted(match["path"]))
        if (found := _path(path, file.parent, is_path=True)) is not None:
            yield found


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def statements_hash(
    file: Path, environ: Mapping[str, str], base: Path | None = None, names: Mapping[Path, str] = _NO_NAMES
) -> str:
    """SHA-256 over what a requirements file says; not over comments, passwords, places of local sources."""
    lines = (named_requirement(line, base, names) for line in requirement_lines(file, environ))
    return hashlib.sha256(without_credentials("\n".join(lines)).encode()).hexdigest()


def required_name(text: str) -> str | None:
    """The canonical name of the package that a requirement asks for, or None where it says none."""
    found = _requirement(text.split(" #")[0].strip())
    return None if found is None else str(canonicalize_name(found.name))


def local_requirement(text: str, base: Path | None = None) -> Path | None:
    """The folder or file that a requirement names, or None for one from an index."""
    return _split(text, base)[1]


def named_requirement(text: str, base: Path | None, names: Mapping[Path, str]) -> str:
    """The same requirement, with a name in place of the path of the folder or file that it names."""
    name, path, extras, rest = _split(text, base)
    return text if path is None or path not in names else f"{name} @ {names[path]}{extras}{rest}"


def absolute_requirement(text: str, base: Path) -> str:
    """The same requirement, with the folder or file that it names found from anywhere."""
    name, path, extras, rest = _split(text, base)
    if path is None:
        return text
    if name:
        return f"{name} @ {path.as_uri()}{rest}"
    return f"{path.as_uri() if ' ' in str(path) else path}{extras}{rest}"


def _split(text: str, base: Path | None) -> tuple[str, Path | None, str, str]:
    """Name with extras before an @, path, extras behind the path, and what follows: a marker, options."""
    base = base or Path.cwd()
    text = text.strip().replace("${PROJECT_ROOT}", str(base))
    bare = _EDITABLE.sub("", text, count=1)
    end = _OPTIONS.search(bare)
    bare, options = (bare[: end.start()], bare[end.start() :]) if end else (bare, "")
    named, editable = _requirement(bare), _EDITABLE.match(text) is not None
    if named is not None and named.url:
        extras = f"[{','.join(sorted(named.extras))}]" if named.extras else ""
        marker = f" ; {named.marker}" if named.marker else ""
        return f"{named.name}{extras}", _path(named.url, base), "", f"{marker}{options}"
    if named is not None and not editable and not bare.endswith(_ARCHIVES):
        return "", None, "", ""
    return _unnamed(bare, base, options, editable)


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _unnamed(text: str, base: Path, options: str, editable: bool) -> tuple[str, Path | None, str, str]:
    """A path or a URL by itself, with extras, and with a marker behind a blank: no standard has these."""
    end = _MARKER.search(text)
    text, marker = (text[: end.start()], text[end.start() :]) if end else (text, "")
    extras = _EXTRAS.search(text)
    text, found = (text[: extras.start()], extras[0]) if extras else (text, "")
    return "", _path(text.strip(), base, is_path=editable), found, f"{marker}{options}"


def _path(target: str, base: Path, *, is_path: bool = False) -> Path | None:
    if match := _FILE_URL.match(target):
        return _resolved(unquote(target[match.end() :].partition("#")[0]), base)
    if "://" in target or target.startswith("-"):  # an index's, or an option
        return None
    is_path = is_path or "/" in target or target in (".", "..") or target.endswith(_ARCHIVES)  # no name
    return _resolved(target.partition("#")[0], base) if is_path else None


def _resolved(path: str, base: Path) -> Path:
    return (base / re.sub("^/+", "/", path)).resolve()
