"""Whatever folder or file of this machine uv finds, it counts by its content, or is refused by its name."""

import pytest
from local_sources import value, write_package

from raycrew.venv_manager import EnvironmentSpec, SpecError, ensure, parse
from raycrew.venv_manager._uv import run_uv
from raycrew.venv_manager.testing import make_wheel, write_project

pytestmark = pytest.mark.hostile


def source(name, path):
    return f'[tool.uv.sources]\n{name} = {{ path = "{path}" }}\n'


def of_the_root(top, value):
    """A member needs what only the root of its workspace says the place of."""
    more = '[tool.uv.workspace]\nmembers = ["members/*"]\n' + source("inner", "inner")
    write_project(top, name="root", more=more)
    write_project(top / "members" / "one", name="one", dependencies=["inner"])
    write_package(top / "inner", value)
    return f"uv run --directory {top} --package one"


def of_a_flag(top, value):
    write_package(top / "outer", 0, dependencies=["inner"], more=source("inner", "../inner"))
    write_package(top / "inner", value)
    return f"uv run --no-project --directory {top} --with ./outer"


def of_a_script(top, value):
    of_a_flag(top, value)
    (top / "job.py").write_text(
        '# /// script\n# dependencies = ["outer"]\n# [tool.uv.sources]\n# outer = { path = "outer" }\n# ///\n'
    )
    return top / "job.py"


def of_a_requirement(top, value):
    """A path dependency of a path dependency, that is written as a URL."""
    write_package(top / "inner", value)
    write_package(top / "middle", 0, dependencies=[f"inner @ {(top / 'inner').as_uri()}"])
    write_package(top / "outer", 0, dependencies=["middle"], more=source("middle", "../middle"))
    (top / "all.txt").write_text("./outer\n")
    return top / "all.txt"


def of_a_member(top, value):
    """A path dependency that is a member of a workspace of its own."""
    more = (
        '[tool.uv.workspace]\nmembers = ["outer", "inner"]\n[tool.uv.sources]\ninner = { workspace = true }\n'
    )
    write_project(top / "libs", name="root", more=more)
    write_package(top / "libs" / "outer", 0, dependencies=["inner"])
    write_package(top / "libs" / "inner", value)
    return write_project(top / "p", dependencies=["outer"], more=source("outer", "../libs/outer"))


LAYOUTS = [of_the_root, of_a_flag, of_a_script, of_a_requirement, of_a_member]


def built(store, given):
    return ensure(parse(given).replace(carry=False), store=store)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edit_and_another_checkout_count(store, tmp_path, layout):
    one, other = (tmp_path / name / "checkout" for name in ("one", "other"))
    given = layout(one, 1)
    first = built(store, given)
    assert value(first, "inner") == 1
    assert value(built(store, layout(other, 2)), "inner") == 2
    (file,) = one.rglob("inner.py")
    file.write_text("VALUE = 3\n")
    assert value(built(store, given), "inner") == 3
    if layout is not of_a_requirement:  # whose URL is counted as it is written
        file.write_text("VALUE = 2\n")
        assert built(store, given) == built(store, layout(other, 2))


@pytest.mark.parametrize("layout", [of_the_root, of_a_member])
def test_an_edit_of_what_a_lock_names_counts(store, tmp_path, environ, layout):
    given = layout(tmp_path / "checkout", 1)
    spec = parse(given).replace(carry=False, locked=True)
    run_uv(["lock", "-q", "--project", spec.path], environ=environ)
    assert value(ensure(spec, store=store), "inner") == 1
    (file,) = (tmp_path / "checkout").rglob("inner.py")
    file.write_text("VALUE = 2\n")
    assert value(ensure(spec, store=store), "inner") == 2


def test_what_a_needed_source_needs_is_chosen_anew(store, tmp_path):
    given = of_the_root(tmp_path, 1)
    assert "demo" not in built(store, given).stamp["packages"]
    write_package(tmp_path / "inner", 1, dependencies=["demo"])
    assert built(store, given).stamp["packages"]["demo"] == "2.0"


def test_what_a_lock_still_names_is_refused_by_name(store, tmp_path, environ):
    given = of_the_root(tmp_path, 1)
    spec = parse(given).replace(carry=False, frozen=True)
    run_uv(["lock", "-q", "--project", spec.path], environ=environ)
    write_project(tmp_path, name="root", more='[tool.uv.workspace]\nmembers = ["members/*"]\n')
    with pytest.raises(SpecError, match=r"inner is built from .*/inner, which nothing .* names"):
        ensure(spec, store=store)


def test_what_only_a_wheel_names_is_refused_by_name(store, tmp_path):
    write_package(tmp_path / "inner", 1)
    name, content = make_wheel("outer", "1", requires=[f"inner @ {(tmp_path / 'inner').as_uri()}"])
    (tmp_path / name).write_bytes(content)
    spec = EnvironmentSpec.requirements([str(tmp_path / name)], carry=False)
    with pytest.raises(SpecError, match=r"inner is built from .*/inner, which nothing .* names"):
        ensure(spec, store=store)
    both = spec.replace(packages=[*spec.packages, str(tmp_path / "inner")])
    assert value(ensure(both, store=store), "inner") == 1


def test_a_folder_below_one_that_a_standard_lock_names_counts(store, tmp_path):
    write_package(tmp_path / "repo" / "inner", 1)
    entry = '[[packages]]\nname = "inner"\ndirectory = { path = "repo", subdirectory = "inner" }\n'
    (tmp_path / "pylock.toml").write_text(f'lock-version = "1.0"\ncreated-by = "hand"\n{entry}')
    first = built(store, tmp_path / "pylock.toml")
    (tmp_path / "repo" / "inner" / "inner.py").write_text("VALUE = 2\n")
    assert (value(first, "inner"), value(built(store, tmp_path / "pylock.toml"), "inner")) == (1, 2)


def test_a_link_to_a_source_is_the_source(store, tmp_path):
    write_package(tmp_path / "inner", 1)
    (tmp_path / "linked").symlink_to(tmp_path / "inner")
    spec = EnvironmentSpec.requirements([f"inner @ {(tmp_path / 'linked').as_uri()}"], carry=False)
    first = ensure(spec, store=store)
    (tmp_path / "inner" / "inner.py").write_text("VALUE = 2\n")
    assert (value(first, "inner"), value(ensure(spec, store=store), "inner")) == (1, 2)


def test_a_project_below_a_workspace_that_it_is_no_member_of_has_its_own_lock(store, tmp_path, environ):
    more = '[tool.uv.workspace]\nmembers = ["members/*"]\nexclude = ["members/out"]\n'
    write_project(tmp_path, name="root", more=more, dependencies=["demo==1.0"])
    run_uv(["lock", "-q", "--project", tmp_path], environ=environ)
    for folder in (tmp_path / "apart", tmp_path / "members" / "out"):
        write_project(folder, name="apart", dependencies=["leaf"])
        spec = EnvironmentSpec.project(folder, locked=True, carry=False)
        for version in ("1.0", "1.1"):
            run_uv(["lock", "-q", "--project", folder, "-P", f"leaf=={version}"], environ=environ)
            assert ensure(spec, store=store).stamp["packages"] == {"leaf": version}
