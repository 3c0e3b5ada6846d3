"""What the pages and workflows say of this repository is there: rooms, sessions, tests of modules."""

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import tarfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.parent.name.replace("-", "_"): path / "raycrew" / path.parent.name.replace("-", "_")
    for path in ROOT.glob("packages/*/src")
}


def named_rooms() -> Iterator[tuple[str, str]]:
    """(package, path within it) of each room that a journey of the architecture page names."""
    journeys = (ROOT / "docs/architecture.md").read_text().split("## Journeys")[1]
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


def test_the_top_of_a_package_is_seen_at_a_glance_and_no_source_is_long() -> None:
    """About fifteen wings and rooms, and 350 lines: a module that grows a second idea is split."""
    for package, source in SOURCES.items():
        top = [*source.glob("*/__init__.py"), *source.glob("[!_]*.py"), *source.glob("_[!_]*.py")]
        assert len(top) <= 16, (package, sorted(map(str, top)))
        assert not [str(path) for path in source.rglob("*.py") if lines_of(path) > 350], package


def wings() -> Iterator[Path]:
    """The folder of each wing and sub-wing."""
    for source in SOURCES.values():
        yield from (door.parent for door in source.rglob("*/__init__.py"))


def test_a_wing_has_about_ten_rooms_and_says_what_it_does() -> None:
    for wing in wings():
        rooms = [
            *wing.glob("*/__init__.py"),
            *(path for path in wing.glob("*.py") if path.stem != "__init__"),
        ]
        assert len(rooms) <= 13, wing
        assert ast.get_docstring(ast.parse((wing / "__init__.py").read_text())), wing


def test_a_door_hands_out_what_others_use() -> None:
    """Private wings; of what is public, users may use all."""
    used: defaultdict[tuple[str, str], set[Path]] = defaultdict(set)
    for path in [*ROOT.glob("packages/**/*.py"), *ROOT.glob("integration-tests/**/*.py")]:
        for name in imported_from_wings(path):
            used[name].add(path)
    for path in ROOT.glob("packages/*/pyproject.toml"):  # entry points
        for name in re.findall(r'"(raycrew\.[\w.]+):(\w+)"', path.read_text()):
            used[name].add(path)
    for wing in wings():
        package = next(name for name, source in SOURCES.items() if source in wing.parents)
        parts = wing.relative_to(SOURCES[package]).parts
        if any(part.startswith("_") for part in parts):
            door = ".".join(("raycrew", package, *parts))
            unused = [
                name
                for name in handed_out(wing)
                if all(wing in path.parents for path in used[door, name] | used[parts[-1], name])
            ]
            assert not unused, door


def imported_from_wings(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports or takes as an attribute, as (module or name, name)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def handed_out(wing: Path) -> Sequence[str]:
    """What a door has in `__all__`."""
    for node in ast.parse((wing / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text().splitlines())


def targets_of_mutants() -> dict[str, Any]:
    """What mutants/targets.py defines."""
    return runpy.run_path(str(ROOT / "mutants/targets.py"))


def test_test_modules_of_a_package_have_names_of_their_own() -> None:
    """Pytest imports them by name alone, and Ray's workers find them so."""
    for tests in ROOT.glob("packages/*/tests"):
        names = [path.name for path in tests.rglob("*.py") if path.name != "conftest.py"]
        assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_modules_that_are_mutated_exist_and_so_do_the_tests_that_stand_for_them() -> None:
    targets: Mapping[str, Mapping[str, Sequence[str]]] = targets_of_mutants()["TARGETS"]
    paths = [
        path
        for package, modules in targets.items()
        for module, tests in modules.items()
        for path in (
            SOURCES[package.replace("-", "_")] / f"{module}.py",
            *(ROOT / "packages" / package / "tests" / test for test in tests),
        )
    ]
    assert [str(path) for path in paths if not path.exists()] == []


def test_mutations_that_nobody_can_notice_are_of_lines_that_are_there() -> None:
    targets: Mapping[str, Mapping[str, Sequence[str]]] = targets_of_mutants()["TARGETS"]
    stale = []
    for entry in tomllib.loads((ROOT / "mutants/equivalent.toml").read_text())["equivalent"]:
        package, module = entry["module"].split("/", 1)
        source = SOURCES[package.replace("-", "_")] / f"{module}.py"
        lines = map(str.strip, source.read_text().splitlines()) if module in targets[package] else ()
        if entry["before"] not in lines:
            stale.append((entry["module"], entry["before"]))
    assert stale == []


def imported(file: Path) -> set[str]:
    """The first names of all modules that a file imports, wherever it does so."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_each_pure_module_is_mutated_or_left_out_with_a_reason() -> None:
    known = targets_of_mutants()
    for package, source in SOURCES.items():
        mutated, left_out = (known[name][package.replace("_", "-")] for name in ("TARGETS", "LEFT_OUT"))
        pure = {
            str(file.relative_to(source).with_suffix(""))
            for file in source.rglob("*.py")
            if not file.name.startswith("__") and imported(file).isdisjoint(known["EDGE"])
        }
        assert pure - mutated.keys() - left_out.keys() == set(), "a target, or left out with a reason"
        assert left_out.keys() - pure == set(), "left out and not pure, or not there"
        assert not mutated.keys() & left_out.keys()
        assert all(left_out.values())


def test_the_table_says_what_nox_runs_by_default_and_ci_reads_it_from_nox() -> None:
    sessions = set(assigned("noxfile.py", "nox.options.sessions"))
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| ([^|]*?) \|", table(), re.MULTILINE)
    assert {name for name, when in rows if when == "yes"} == sessions
    assert {name for name, when in rows if when == "CI alone"} == {"tests", "lowest"}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "nox --list --json | matrix true" in workflow
    assert "nox --list --json -s tests lowest | matrix" in workflow
    assert not [name for name in sessions - {"build"} if re.search(rf"\b{name}\b", workflow)]


def test_the_table_has_a_row_for_each_session() -> None:
    rows = set(re.findall(r"^\| `(\w+)`", table(), re.MULTILINE))
    functions = [node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if is_session(node)]
    assert rows == {function.name for function in functions}


def is_session(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether nox takes a function for a session of that name."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator).startswith("nox.session") for decorator in decorators)


def table() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().split("| session |")[1].split("\n\n")[0]


@pytest.fixture(scope="module")
def noxfile() -> Any:
    """The module of the sessions."""
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("raycrew_noxfile", ROOT / "noxfile.py")
    if spec is None or spec.loader is None:
        raise ImportError("noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hostile_cases_that_were_skipped_are_counted_apart(tmp_path: Path, noxfile: Any) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="store.test_trust" name="a"/>'
        '<testcase classname="store.test_trust" name="b"><skipped message="not root"/></testcase>'
        '<testcase classname="store.test_trust" name="c"><failure/></testcase>'
        '<testcase classname="uv.test_access" name="d"><skipped/></testcase></testsuite></testsuites>'
    )
    found = list(noxfile.areas_of(tmp_path / "report.xml", "venv-manager"))
    assert found == [("venv-manager: trust", 2, 1, 1), ("venv-manager: access", 0, 0, 1)]


def test_distributions_are_built_again_only_after_a_change(
    tmp_path: Path, noxfile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "one"
    package.mkdir(parents=True)
    (package / "module.py").write_text("1")
    (tmp_path / ".gitignore").write_text("*.log\n")
    assert noxfile.built_of(tmp_path) == "", "nobody says what counts"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    seen = [noxfile.built_of(tmp_path)]
    (package / "other.log").touch()
    os.utime(package / "module.py", (1, 1))
    assert noxfile.built_of(tmp_path) == seen[0] != ""
    for change in (
        lambda: (package / "module.py").write_text("2"),
        lambda: (package / "new.py").touch(),
        lambda: (package / "module.py").chmod(0o755),
        lambda: (package / "new.py").unlink(),
        lambda: (tmp_path / ".gitignore").write_text("*.log\n*.txt\n"),
    ):
        change()
        assert noxfile.built_of(tmp_path) != seen[-1]
        seen.append(noxfile.built_of(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert noxfile.built_of(tmp_path) == "", "there is no git"


class Session:
    """As much of a session of nox as a build without programs needs."""

    def install(self, *packages: str) -> None:
        """Everything is there."""

    def run(self, *command: str) -> None:
        """Nothing is checked."""

    def log(self, text: str) -> None:
        """Nobody reads it."""


@pytest.fixture
def builds(tmp_path: Path, noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is built, how often it was, what is done meanwhile, and a function that asks for a build."""
    found: dict[str, Any] = {"sources": "1", "times": 0, "meanwhile": dict}

    def build(_: object, __: Path, target: str, *___: object) -> None:
        noxfile.DIST.mkdir(exist_ok=True)
        if target == "sdist":
            tarfile.open(noxfile.DIST / "raycrew_one-1.tar.gz", "w:gz").close()
            return
        (noxfile.DIST / "raycrew_one-1-py3-none-any.whl").write_text(found["sources"])
        found["times"] += 1
        found["meanwhile"]()

    monkeypatch.setattr(noxfile, "DIST", tmp_path / "dist")
    monkeypatch.setattr(noxfile, "PACKAGES", ("one",))
    monkeypatch.setattr(noxfile, "built_of", lambda: found["sources"])
    monkeypatch.setattr(noxfile, "hatch_build", build)
    monkeypatch.setattr(noxfile, "check_wheel", lambda *_: None)
    return found


def times(noxfile: Any, builds: dict[str, Any]) -> int:
    """How often it was built, once a build is asked for."""
    noxfile.build(Session())
    return int(builds["times"])


def test_what_was_edited_while_it_was_built_is_built_again(noxfile: Any, builds: dict[str, Any]) -> None:
    builds["meanwhile"] = lambda: builds.update(sources="2")
    assert times(noxfile, builds) == 1
    builds.update(sources="1", meanwhile=dict)
    assert [times(noxfile, builds), times(noxfile, builds)] == [2, 2], "the edit was undone"
    builds["sources"] = ""
    assert [times(noxfile, builds), times(noxfile, builds)] == [3, 4], "nobody says what counts"


def test_distributions_that_are_not_as_they_were_built_are_built_again(
    noxfile: Any, builds: dict[str, Any]
) -> None:
    assert [times(noxfile, builds), times(noxfile, builds)] == [1, 1]
    (wheel,) = noxfile.DIST.glob("*.whl")
    wheel.write_text("another one")
    assert [times(noxfile, builds), times(noxfile, builds)] == [2, 2]
    wheel.unlink()
    assert times(noxfile, builds) == 3
