"""What the pages and workflows say of this repository is there: rooms, sessions, tests of modules."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.parent.name.replace("-", "_"): path / "raycrew" / path.parent.name.replace("-", "_")
    for path in ROOT.glob("packages/*/src")
}


def named_rooms() -> Iterator[tuple[str, str]]:
    """(package, path within it) of each room that a journey of the architecture page names."""
    journeys = (ROOT / "docs/architecture.md").read_text().split("## Five journeys")[1]
    package = ""
    for cell in re.findall(r"^\| (`[^|]+) \|", journeys, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            if name.split(".")[0] in SOURCES:
                package, name = name.split(".")
            yield package, name


def assigned(file: str, name: str) -> Any:
    """The literal that a file gives to a name."""
    for node in ast.parse((ROOT / file).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(target is not None and ast.unparse(target) == name for target in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise KeyError(f"{file} assigns no {name}")


def test_the_rooms_that_journeys_name_exist() -> None:
    rooms = list(named_rooms())
    assert len(rooms) > 60
    missing = [
        f"{package}: {name}"
        for package, name in rooms
        if not ((SOURCES[package] / name).is_dir() or (SOURCES[package] / f"{name}.py").is_file())
    ]
    assert not missing


def test_modules_that_are_mutated_exist_and_so_do_the_tests_that_stand_for_them() -> None:
    targets: Mapping[str, Mapping[str, Sequence[str]]] = assigned("mutants/run.py", "TARGETS")
    files = [
        path
        for package, modules in targets.items()
        for module, tests in modules.items()
        for path in (
            SOURCES[package.replace("-", "_")] / f"{module}.py",
            *(ROOT / "packages" / package / "tests" / test for test in tests),
        )
    ]
    assert [str(path) for path in files if not path.is_file()] == []


def test_the_table_says_what_nox_runs_by_default_and_ci_reads_it_from_nox() -> None:
    sessions = set(assigned("noxfile.py", "nox.options.sessions"))
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| ([^|]*?) \|", table(), re.MULTILINE)
    assert {name for name, when in rows if when == "yes"} == sessions
    assert {name for name, when in rows if when == "CI alone"} == {"tests", "lowest"}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "nox --list --json | matrix true" in workflow
    assert "nox --list --json -s tests lowest | matrix" in workflow
    assert not [name for name in sessions - {"build"} if re.search(rf"\b{name}\b", workflow)]


def table() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().split("| session |")[1].split("\n\n")[0]
