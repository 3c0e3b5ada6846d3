"""What a release must satisfy: its tag, ranges between siblings, breaks of the API that are declared.

`python release/checks.py tag raycrew-cluster-core-v0.2.0` prints the package's folder; `siblings` and `api`
check all packages. Each prints one line per finding and exits with 1 where something is wrong.
"""

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent
DECLARING = ("*.removed.md", "*.changed.md")
COLOURS = re.compile(r"\x1b\[[\d;]*m")


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


def git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails."""
    found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout if found.returncode == 0 else None


def last_tag(folder: Path, root: Path = ROOT) -> str | None:
    """The newest tag of a package before what is there: not the one that releases just that."""
    pattern = f"{project(folder)['name']}-v*"
    tagged = git(root, "tag", "--points-at", "HEAD", "--list", pattern)
    start = "HEAD^" if tagged and not git(root, "status", "--porcelain", str(folder)) else "HEAD"
    found = git(root, "describe", "--tags", "--abbrev=0", "--match", pattern, start)
    return found.strip() if found else None


@dataclass(frozen=True)
class Break:
    """Something of the public API that works no longer as it did, by the names under which users have it.

    Attributes:
        names: (module, name within it) of each way to import it.
        explanation: What changed, and where.
    """

    names: frozenset[tuple[str, str]]
    explanation: str

    def is_told_by(self, told: Collection[str]) -> bool:
        """Whether it is among names that a text tells: whole from its module on."""
        return any(spelling in told for module, name in self.names for spelling in spellings(module, name))

    def __str__(self) -> str:
        module, name = min(self.names, key=lambda each: (each[0].count("."), each))
        return f"{module}.{name}: {self.explanation}"


def spellings(module: str, name: str) -> Iterator[str]:
    """How a text may name something: with none, some or all of its module's path."""
    parts = module.split(".")
    for each in {name, name.removesuffix(".__init__")}:
        yield from (".".join([*parts[start:], each]) for start in range(len(parts) + 1))


def public_names(package: Any) -> dict[str, set[tuple[str, str]]]:
    """By the path where something is defined: (module, name) of each way for users to import it."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def walk(owner: Any, module: str, prefix: str, outer: frozenset[str]) -> None:
        for name, member in owner.all_members.items():
            path = defined_at(member)
            if not member.is_public or path is None or path in outer:
                continue
            found[path].add((module, prefix + name))
            if not member.is_alias and member.is_module:
                walk(member, f"{module}.{name}", "", outer | {path})
            elif member.is_class:
                walk(member, module, f"{prefix}{name}.", outer | {path})

    walk(package, package.path, "", frozenset())
    return found


def defined_at(member: Any) -> str | None:
    """The path where an object is defined; None for something of another library."""
    import griffe

    try:
        return str(member.canonical_path)
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def breaks(folder: Path, tag: str, root: Path = ROOT) -> list[Break]:
    """What of the public API works no longer as it did at a tag, wherever it is defined."""
    import griffe

    name = f"raycrew.{folder.name.replace('-', '_')}"
    source = str((folder / "src").relative_to(root))
    old = griffe.load_git(name, ref=tag, repo=root, search_paths=[source], resolve_aliases=True)
    new = griffe.load(name, search_paths=[str(folder / "src")], resolve_aliases=True)
    before, after = public_names(old), public_names(new)
    found = []
    for change in griffe.find_breaking_changes(old, new):
        path = defined_at(change.obj) or change.obj.path
        if names := before.get(path, set()) | after.get(path, set()):
            explanation = COLOURS.sub("", change.explain(griffe.ExplanationStyle.ONE_LINE))
            found.append(Break(frozenset(names), explanation))
    return found


def declared(folder: Path, tag: str, root: Path = ROOT) -> set[str]:
    """The names in backticks of what tells of something removed or changed since a tag.

    These are fragments, and once a release has collected them, the new lines of the changelog.
    """
    texts = [path.read_text() for pattern in DECLARING for path in (folder / "changelog.d").glob(pattern)]
    changelog = folder / "CHANGELOG.md"
    if changelog.exists():
        old = git(root, "show", f"{tag}:{changelog.relative_to(root)}") or ""
        texts.append(declaring_lines(changelog.read_text(), set(old.splitlines())))
    return {name for text in texts for name in re.findall(r"`([\w.]+)", text)}


def declaring_lines(changelog: str, old: Collection[str]) -> str:
    """The lines of a changelog that are new, under the headings of what was removed or changed."""
    heading, found = "", []
    for line in changelog.splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif heading in ("Removed", "Changed") and line not in old:
            found.append(line)
    return "\n".join(found)


def check_api(root: Path = ROOT, say: Callable[[str], object] = print) -> Iterator[str]:
    """Each break of a package's public API since its last tag that nothing declares."""
    for folder in folders(root):
        tag = last_tag(folder, root)
        if tag is None:
            say(f"{folder.name}: no tag yet; {tag_of(folder)} will be the base of later checks")
            continue
        told, found = declared(folder, tag, root), breaks(folder, tag, root)
        for each in found:
            if not each.is_told_by(told):
                yield f"{folder.name}: undeclared break since {tag}: {each}"
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
