"""The checks of a release, on a made-up repository with a made-up tag."""

import subprocess
from pathlib import Path

import checks
import pytest

PROJECT = """[project]
name = "raycrew-{name}"
version = "{version}"
dependencies = {dependencies}
"""
CODE = '''"""A package."""

__all__ = ["keep", "lose"]


def keep(x: int) -> int:
    """Stay."""
    return x


def lose() -> None:
    """Go."""


def _inner() -> None:
    """Nobody's."""
'''


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def add_package(root: Path, name: str, version: str, dependencies: list[str]) -> Path:
    folder = root / "packages" / name
    module = folder / "src" / "raycrew" / name.replace("-", "_")
    module.mkdir(parents=True)
    (folder / "changelog.d").mkdir()
    (module / "__init__.py").write_text(CODE)
    text = PROJECT.format(name=name, version=version, dependencies=dependencies)
    (folder / "pyproject.toml").write_text(text)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    add_package(tmp_path, "lower-one", "0.3.2", ["numpy>=1"])
    add_package(tmp_path, "upper-one", "0.1.0", ["raycrew-lower-one>=0.3,<0.4"])
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def rewrite(root: Path, old: str, new: str) -> None:
    path = root / "packages/lower-one/src/raycrew/lower_one/__init__.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_tag_names_its_package(repository: Path) -> None:
    assert checks.check_tag("raycrew-lower-one-v0.3.2", repository).name == "lower-one"


@pytest.mark.parametrize(
    "tag", ["raycrew-lower-one-v0.3.1", "raycrew-lower-v0.3.2", "v0.3.2", "raycrew-lower-one"]
)
def test_other_tags_are_refused(repository: Path, tag: str) -> None:
    with pytest.raises(checks.ReleaseError, match=tag):
        checks.check_tag(tag, repository)


def test_ranges_between_siblings_fit(repository: Path) -> None:
    assert list(checks.check_siblings(repository)) == []


def test_a_sibling_that_moved_on_is_found(repository: Path) -> None:
    path = repository / "packages/lower-one/pyproject.toml"
    path.write_text(path.read_text().replace("0.3.2", "0.4.0"))
    (finding,) = checks.check_siblings(repository)
    assert finding.startswith("upper-one requires raycrew-lower-one")


def test_without_a_tag_this_is_the_base(repository: Path) -> None:
    said: list[str] = []
    assert list(checks.check_api(repository, said.append)) == []
    assert "raycrew-lower-one-v0.3.2 will be the base of later checks" in said[0]


def test_an_undeclared_break_is_found(repository: Path) -> None:
    git(repository, "tag", "raycrew-lower-one-v0.3.2")
    rewrite(repository, '__all__ = ["keep", "lose"]', '__all__ = ["keep"]')
    rewrite(repository, "def lose() -> None:", "def _lost() -> None:")
    rewrite(repository, "def keep(x: int)", "def keep(x: int, y: int)")
    findings = list(checks.check_api(repository, lambda _: None))
    assert any("lose" in finding for finding in findings)
    assert any("keep" in finding for finding in findings)


def test_a_declared_break_passes(repository: Path) -> None:
    git(repository, "tag", "raycrew-lower-one-v0.3.2")
    rewrite(repository, '__all__ = ["keep", "lose"]', '__all__ = ["keep"]')
    rewrite(repository, "def lose() -> None:", "def _lost() -> None:")
    fragment = repository / "packages/lower-one/changelog.d/+gone.removed.md"
    fragment.write_text("`lose` is gone.\n")
    assert list(checks.check_api(repository, lambda _: None)) == []


def test_what_is_private_may_change(repository: Path) -> None:
    git(repository, "tag", "raycrew-lower-one-v0.3.2")
    rewrite(repository, "def _inner() -> None:", "def _other(x: int) -> None:")
    assert list(checks.check_api(repository, lambda _: None)) == []


INNER = '''"""Where it is written."""


class _Base:
    """Not to be imported."""

    def inherited(self, x: int) -> int:
        """Work."""
        return x


class Worker(_Base):
    """What users know."""

    def __init__(self, size: int) -> None:
        """Begin."""

    def run(self, x: int) -> int:
        """Work."""
        return x

    def _step(self, x: int) -> int:
        """Be nobody's business."""
        return x


class Unknown:
    """What no user can import."""

    def run(self, x: int) -> int:
        """Work."""
        return x
'''
DOOR = '''"""A wing."""

from raycrew.lower_one._wing._inner import Unknown, Worker

__all__ = ["Unknown", "Worker"]
'''
TOP = '''"""A package."""

from raycrew.lower_one._wing import Worker

__all__ = ["Worker"]
'''


@pytest.fixture
def reexporting(repository: Path) -> Path:
    """A repository whose package hands out, through two doors, a class that is written in `_inner.py`."""
    source = repository / "packages/lower-one/src/raycrew/lower_one"
    (source / "_wing").mkdir()
    (source / "__init__.py").write_text(TOP)
    (source / "_wing/__init__.py").write_text(DOOR)
    (source / "_wing/_inner.py").write_text(INNER)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "wing")
    git(repository, "tag", "raycrew-lower-one-v0.3.2")
    return repository


def rewrite_inner(root: Path, old: str, new: str, file: str = "_inner.py") -> None:
    path = root / "packages/lower-one/src/raycrew/lower_one/_wing" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def declare(root: Path, text: str) -> None:
    (root / "packages/lower-one/changelog.d/+it.changed.md").write_text(text)


def undeclared(root: Path) -> list[str]:
    return list(checks.check_api(root, lambda _: None))


CHANGES = {
    "Worker.__init__": ("size: int", "size: int, colour: str"),
    "Worker.run": ("def run(self, x: int)", "def run(self, y: int)"),
    "Worker.inherited": ("def inherited(self, x: int)", "def inherited(self, x: int, y: int)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_break_of_what_is_handed_out_is_found_under_the_name_that_users_import(
    reexporting: Path, name: str
) -> None:
    rewrite_inner(reexporting, *CHANGES[name])
    findings = undeclared(reexporting)
    assert findings and all(f"raycrew.lower_one.{name}: " in finding for finding in findings)
    assert not any("\x1b" in finding for finding in findings)


def test_a_removed_method_is_found_after_its_class_moved(reexporting: Path) -> None:
    rewrite_inner(reexporting, "def run(self", "def go(self")
    rewrite_inner(reexporting, "_inner", "_other", "__init__.py")
    wing = reexporting / "packages/lower-one/src/raycrew/lower_one/_wing"
    (wing / "_inner.py").rename(wing / "_other.py")
    (finding,) = undeclared(reexporting)
    assert "raycrew.lower_one.Worker.run: " in finding


def test_what_nobody_can_import_may_change(reexporting: Path) -> None:
    rewrite_inner(reexporting, "def _step(self, x: int)", "def _step(self, y: int)")
    rewrite_inner(reexporting, INNER[INNER.index("class Unknown") :], "")
    rewrite_inner(reexporting, "Unknown, ", "", "__init__.py")
    rewrite_inner(reexporting, '"Unknown", ', "", "__init__.py")
    assert undeclared(reexporting) == []


@pytest.mark.parametrize(
    "text", ["`Worker.run(y)`", "`raycrew.lower_one.Worker.run`", "`lower_one.Worker.run`"]
)
def test_a_break_may_be_told_with_its_module_or_without(reexporting: Path, text: str) -> None:
    rewrite_inner(reexporting, *CHANGES["Worker.run"])
    declare(reexporting, f"{text} has another argument.")
    assert undeclared(reexporting) == []


@pytest.mark.parametrize("text", ["`run`", "`Worker`", "`Other.run`", "Worker.run", "`_inner.Worker.run`"])
def test_other_names_do_not_tell_of_a_break(reexporting: Path, text: str) -> None:
    rewrite_inner(reexporting, *CHANGES["Worker.run"])
    declare(reexporting, f"{text} has another argument.")
    assert undeclared(reexporting)


def test_a_constructor_may_be_told_by_its_class(reexporting: Path) -> None:
    rewrite_inner(reexporting, *CHANGES["Worker.__init__"])
    declare(reexporting, "`Worker(colour=)` must be given.")
    assert undeclared(reexporting) == []


def test_a_tagged_release_is_compared_with_the_one_before_and_its_changelog(reexporting: Path) -> None:
    rewrite_inner(reexporting, *CHANGES["Worker.run"])
    folder = reexporting / "packages/lower-one"
    (folder / "pyproject.toml").write_text((folder / "pyproject.toml").read_text().replace("0.3.2", "0.4.0"))
    for heading, is_told in [("Added", False), ("Changed", True)]:
        (folder / "CHANGELOG.md").write_text(f"## 0.4.0\n\n### {heading}\n\n- `Worker.run` is faster.\n")
        git(reexporting, "add", "-A")
        git(reexporting, "commit", "-qm", "release")
        git(reexporting, "tag", "-f", "raycrew-lower-one-v0.4.0")
        said: list[str] = []
        assert bool(list(checks.check_api(reexporting, said.append))) is not is_told
        assert "since raycrew-lower-one-v0.3.2" in said[0]
