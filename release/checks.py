"""What a release must satisfy: its tag, ranges between siblings, breaks of the API that are declared.

`python release/checks.py tag raycrew-cluster-core-v0.2.0` prints the package's folder; `siblings` and `api`
check all packages. Each prints one line per finding and exits with 1 where something is wrong.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent
DECLARING = ("*.removed.md", "*.changed.md")


class ReleaseError(Exception):
    """A release that must not happen; the message says why."""


def folders(root: Path = ROOT) -> list[Path]:
    """The folder of each package."""
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))


def project(folder: Path) -> dict[str, Any]:
    """The `[project]` table of a package."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def tag_of(folder: Path) -> str:
    """The tag that releases a package as it stands."""
    table = project(folder)
    return f"{table['name']}-v{table['version']}"


def check_tag(tag: str, root: Path = ROOT) -> Path:
    """The folder of the package that a tag releases.

    Raises:
        ReleaseError: No package has this name, or its static version is another.
    """
    for folder in folders(root):
        if tag.rpartition("-v")[0] == project(folder)["name"]:
            if tag != tag_of(folder):
                raise ReleaseError(f"tag {tag}, but {folder.name}/pyproject.toml makes it {tag_of(folder)}")
            return folder
    raise ReleaseError(f"tag {tag} names no package of this repository")


def check_siblings(root: Path = ROOT) -> Iterator[str]:
    """Each range between siblings that is not `>=0.N,<0.N+1` of the sibling's version."""
    versions = {project(folder)["name"]: Version(project(folder)["version"]) for folder in folders(root)}
    for folder in folders(root):
        for requirement in map(Requirement, project(folder)["dependencies"]):
            if (sibling := versions.get(requirement.name)) is not None:
                wanted = SpecifierSet(
                    f">={sibling.major}.{sibling.minor},<{sibling.major}.{sibling.minor + 1}"
                )
                if requirement.specifier != wanted:
                    yield f"{folder.name} requires {requirement}, not {requirement.name}{wanted}"


def last_tag(folder: Path, root: Path = ROOT) -> str | None:
    """The newest tag of a package that is an ancestor of what is checked out."""
    pattern = f"{project(folder)['name']}-v*"
    found = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", pattern],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def breaks(folder: Path, tag: str, root: Path = ROOT) -> list[tuple[str, str]]:
    """What of the public API works no longer as it did at a tag: dotted names, each with an explanation."""
    import griffe

    name = f"raycrew.{folder.name.replace('-', '_')}"
    source = str((folder / "src").relative_to(root))
    old = griffe.load_git(name, ref=tag, repo=root, search_paths=[source], resolve_aliases=True)
    new = griffe.load(name, search_paths=[str(folder / "src")], resolve_aliases=True)
    return [
        (change.obj.path, change.explain(griffe.ExplanationStyle.ONE_LINE))
        for change in griffe.find_breaking_changes(old, new)
        if not re.search(r"\._[a-z]", change.obj.path)
    ]


def declared(folder: Path) -> set[str]:
    """The names in backticks of the fragments that tell of something removed or changed."""
    texts = (path.read_text() for pattern in DECLARING for path in (folder / "changelog.d").glob(pattern))
    return {name for text in texts for name in re.findall(r"`([\w.]+)", text)}


def check_api(root: Path = ROOT, say: Callable[[str], object] = print) -> Iterator[str]:
    """Each break of a package's public API since its last tag that no fragment declares."""
    for folder in folders(root):
        tag = last_tag(folder, root)
        if tag is None:
            say(f"{folder.name}: no tag yet; {tag_of(folder)} will be the base of later checks")
            continue
        named = declared(folder)
        found = breaks(folder, tag, root)
        for path, explanation in found:
            parts = path.split(".")
            if not named & {".".join(parts[start:]) for start in range(len(parts))}:
                yield f"{folder.name}: undeclared break since {tag}: {explanation}"
        say(f"{folder.name}: {len(found)} breaks since {tag}")


def main(arguments: Sequence[str]) -> int:
    """Run one check."""
    match arguments:
        case ["tag", tag]:
            try:
                print(check_tag(tag).relative_to(ROOT))
            except ReleaseError as error:
                print(error, file=sys.stderr)
                return 1
            return 0
        case ["siblings"]:
            findings = list(check_siblings())
        case ["api"]:
            findings = list(check_api())
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for finding in findings:
        print(finding, file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
