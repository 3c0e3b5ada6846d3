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
