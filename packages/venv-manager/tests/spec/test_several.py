"""One text is not several, and a path object is as good as its text."""

import os

import pytest

from raycrew.venv_manager import ActorEnvironmentRegistry, EnvironmentSpec, Store, collect, parse, prefetch

pytestmark = pytest.mark.hostile

SEVERAL = (
    "packages",
    "requirement_files",
    "extras",
    "groups",
    "no_extras",
    "no_groups",
    "indexes",
    "find_links",
)


class PathObject(os.PathLike):
    """Is a path, but no `Path`."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.mark.parametrize("name", [*SEVERAL, "environment"])
def test_one_text_is_not_taken_for_its_letters(name):
    with pytest.raises(TypeError, match=f"{name} is 'einops'; several are expected"):
        EnvironmentSpec("project", "/folder", **{name: "einops"})
    with pytest.raises(TypeError, match=name):
        EnvironmentSpec("project", "/folder").replace(**{name: "einops"})


def test_nor_are_owners_and_names(tmp_path):
    with pytest.raises(TypeError, match="trusted_owners"):
        Store(tmp_path, trusted_owners="root")
    with pytest.raises(TypeError, match="keep"):
        collect(Store(tmp_path), keep="worker")
    with pytest.raises(TypeError, match="names"):
        prefetch(ActorEnvironmentRegistry(), names="pkg.Worker")


def test_a_path_object_is_a_path_wherever_one_is_taken(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '0'\n")
    (tmp_path / "script.py").write_text("# /// script\n# dependencies = []\n# ///\n")
    (tmp_path / "pylock.toml").touch()
    (listed := tmp_path / "listed.txt").write_text("demo\n")
    text, given = str(tmp_path), PathObject(tmp_path)
    assert EnvironmentSpec.project(given) == EnvironmentSpec.project(text) == parse(given)
    assert EnvironmentSpec.requirements(PathObject(listed)) == EnvironmentSpec.requirements(str(listed))
    assert EnvironmentSpec.script(PathObject(tmp_path / "script.py")).path == f"{text}/script.py"
    assert EnvironmentSpec.pylock(PathObject(tmp_path / "pylock.toml")).path == f"{text}/pylock.toml"
    assert EnvironmentSpec.interpreter(given).path == text
    spec = EnvironmentSpec.requirements(
        [given], python=given, wheelhouse=given, requirement_files=[given], find_links=[given]
    )
    assert (spec.python, spec.wheelhouse) == (text, text)
    assert spec.packages == spec.requirement_files == spec.find_links == (text,)
    assert EnvironmentSpec.from_dict(spec.to_dict()) == spec
    assert Store(given).root == tmp_path
