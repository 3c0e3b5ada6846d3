"""Which folders and files of this machine project files lead to, and in which order."""

import pytest

from raycrew.venv_manager._spec.local.sources import (
    build_sources,
    has_build_code,
    local_sources,
    member,
    sources_named,
    with_theirs,
    workspace_root,
)
from raycrew.venv_manager.errors import SpecError
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.smoke
BUILT = '[build-system]\nrequires = [{needs}]\nbuild-backend = "b"\n'


def names(top, found):
    return [path.relative_to(top).as_posix() for path in found]


def sources(**places):
    return "[tool.uv.sources]\n" + "".join(f"{name} = {place}\n" for name, place in places.items())


def at(path):
    return f'{{ path = "{path}" }}'


@pytest.fixture
def top(tmp_path):
    return tmp_path.resolve()


def test_a_project_counts_where_it_is_a_package_and_its_sources_in_turn(top):
    write_project(top / "a", name="a", more=sources(b=at("../b"), c=at("../c-1.whl")))
    write_project(top / "b", name="b", more=sources(d=f"[{at('../d')}, {at('../e')}]"))
    write_project(top / "d", name="d", more=sources(a=at("../a")))
    assert names(top, local_sources(top / "a")) == ["c-1.whl", "b", "e", "d"]
    write_project(top / "a", name="a", more=BUILT.format(needs="") + sources(b=at("../b")))
    assert names(top, local_sources(top / "a")) == ["a", "b", "e", "d"]
    assert names(top, with_theirs([top / "d", top / "b"]))[0] == "d"


@pytest.mark.parametrize(
    "more",
    [
        {"dependencies": ["inner"]}, {"extras": {"x": ["Inner>0"]}}, {"groups": {"dev": ["inner[x]"]}},
        {"more": BUILT.format(needs='"inner"')}, {"more": '[tool.uv]\ndev-dependencies = ["inner"]\n'},
    ],
)  # fmt: skip
def test_a_member_gets_the_sources_of_its_root_for_what_it_needs(top, more):
    workspace = '[tool.uv.workspace]\nmembers = ["m/*"]\n'
    write_project(top, name="root", more=workspace + sources(inner=at("inner"), other=at("other")))
    write_project(top / "m" / "one", name="one", **more)
    write_project(top / "m" / "two", name="two", dependencies=["nothing"])
    assert names(top, with_theirs([top / "m" / "one"])[1:]) == ["inner"]
    assert with_theirs([top / "m" / "two"]) == [top / "m" / "two"]


def test_a_members_own_source_goes_before_that_of_its_root(top):
    write_project(
        top, name="root", more='[tool.uv.workspace]\nmembers = ["one"]\n' + sources(inner=at("inner"))
    )
    write_project(top / "one", name="one", dependencies=["inner"], more=sources(Inner=at("own")))
    assert names(top, with_theirs([top / "one"])) == ["one", "one/own"]


def test_what_a_member_needs_may_only_be_known_when_it_is_built(top):
    write_project(
        top, name="root", more='[tool.uv.workspace]\nmembers = ["one"]\n' + sources(inner=at("inner"))
    )
    write_project(top / "one", name="one")
    file = top / "one" / "pyproject.toml"
    file.write_text(file.read_text().replace("dependencies = []", 'dynamic = ["dependencies"]'))
    assert names(top, with_theirs([top / "one"])) == ["one", "inner"]


def test_members_are_named_as_projects_are(top):
    more = '[tool.uv.workspace]\nmembers = ["m/*", "none"]\nexclude = ["m/out"]\n' + sources(
        two_x="{ workspace = true }", gone="{ workspace = true }", far='{ git = "https://h/r" }'
    )
    write_project(top, name="root", more=more)
    for name in ("one", "Two.X", "out"):
        write_project(top / "m" / name, name=name)
    (top / "m" / "empty").mkdir()
    assert names(top, with_theirs([top])) == [".", "m/Two.X"]
    assert member(top, "two-x") == member(top, "Two_X") == top / "m" / "Two.X"
    with pytest.raises(SpecError, match=r"has no package 'out'; it has one, root, two-x"):
        member(top, "out")
    assert [workspace_root(top / "m" / name) for name in ("one", "out")] == [top, top / "m" / "out"]


def test_direct_references_and_what_builds_need(top):
    write_project(top / "a", name="a", dependencies=[f"b @ {(top / 'b').as_uri()}"])
    write_project(
        top / "b", name="b",
        more=BUILT.format(needs='"tool", "x"') + sources(tool=at("../tool"), c=at("../c")),
    )  # fmt: skip
    write_project(top / "tool", name="tool", more=sources(deep=at("../deep")))
    assert names(top, with_theirs([top / "a"])) == ["a", "b", "c", "tool", "deep"]
    assert names(top, build_sources(top / "b")) == ["tool", "deep"]
    assert list(build_sources(top / "b").values()) == [{"tool"}, {"deep"}]
    assert build_sources(top / "a") == build_sources(top / "nowhere") == {}
    assert list(sources_named({"x": {"path": "y"}}, top)) == [("x", top / "y")]


@pytest.mark.parametrize(
    ("files", "has"),
    [
        ({"pyproject.toml": "[project]\n"}, False),
        ({"pyproject.toml": "[tool.hatch.version]\npath = 'a'\n", "hatch.toml": "[build]\n"}, False),
        ({"pyproject.toml": "", "setup.py": ""}, True),
        ({"pyproject.toml": "", "pdm_build.py": ""}, True),
        ({"pyproject.toml": "[build-system]\nbackend-path = ['.']\n"}, True),
        ({"pyproject.toml": "[tool.poetry.build]\nscript = 'b.py'\n"}, True),
        ({"pyproject.toml": "[tool.hatch.build.targets.wheel.hooks.custom]\n"}, True),
        ({"pyproject.toml": "", "hatch.toml": "[build.targets.wheel.hooks.custom]\n"}, True),
        ({"pyproject.toml": "[[tool.some.list]]\ncustom-hook = 'b.py'\n"}, True),
        ({"pyproject.toml": "[tool.setuptools.cmdclass]\nbuild = 'b.B'\n"}, True),
    ],
)
def test_code_of_its_own_that_takes_part_in_a_build(tmp_path, files, has):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert has_build_code(tmp_path) is has
