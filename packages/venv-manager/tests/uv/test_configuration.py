"""The user's and the system's `uv.toml`, and pip's configuration beside them."""

import json

import pytest

from raycrew.venv_manager import EnvironmentSpec, NetworkError, ResolutionError, Store, ensure, identify
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._build import Recipe
from raycrew.venv_manager._uv import configured, index_variables
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.testing import LocalIndex, write_project

SPEC = EnvironmentSpec.requirements(["demo"], carry=False)


@pytest.fixture
def places(tmp_path, uv_cache):
    """The folders of a user's and of the system's `uv.toml`, and an environment that has only those."""
    user, system = tmp_path / "user" / "uv", tmp_path / "system" / "uv"
    user.mkdir(parents=True)
    system.mkdir(parents=True)
    base = LocalIndex(tmp_path / "none").environ(uv_cache)
    environ = {k: v for k, v in base.items() if k != "UV_DEFAULT_INDEX"} | {
        "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(user.parent), "XDG_CONFIG_DIRS": str(system.parent),
    }  # fmt: skip
    return user / "uv.toml", system / "uv.toml", environ


@pytest.fixture
def outside(tmp_path):
    """An index that nobody may be led to: its `demo` is newer."""
    index = LocalIndex(tmp_path / "outside")
    index.add("demo", "9.0")
    return index


@pytest.mark.hostile
@pytest.mark.parametrize("level", [0, 1])
def test_an_index_of_the_user_or_the_system_counts_and_not_that_of_pip(
    level, tmp_path, places, index, outside
):
    environ = places[2] | {"PIP_INDEX_URL": outside.url, "PIP_EXTRA_INDEX_URL": outside.url}
    assert ensure(SPEC, store=Store(tmp_path / "s", environ=environ)).stamp["packages"] == {"demo": "9.0"}
    places[level].write_text(f'index-url = "{index.url}"\n')
    store = Store(tmp_path / "s", environ=environ)
    built = ensure(SPEC, store=store)
    assert built.stamp["packages"] == {"demo": "2.0"}
    assert index.url in (built.path / "uv.toml").read_text()


@pytest.mark.hostile
def test_every_node_uses_what_the_driver_was_configured_with(tmp_path, places, index, outside):
    user, _, environ = places
    user.write_text(f'index-url = "{index.url}"\nno-binary-package = ["nothing"]\n')
    recipe = Recipe.from_bytes(prepare(SPEC, Store(tmp_path / "s", environ=environ)).to_bytes())
    user.write_text(f'index-url = "{outside.url}"\nconstraint-dependencies = ["demo<1"]\n')
    there = Store(tmp_path / "t", environ=environ | {"UV_INDEX": outside.url, "UV_NO_BINARY_PACKAGE": "demo"})
    built = there.install(recipe.key, lambda: recipe)
    assert built.stamp["packages"] == {"demo": "2.0"}
    assert "nothing" in (built.path / "uv.toml").read_text()


@pytest.mark.smoke
@pytest.mark.hostile
def test_settings_that_decide_count_and_others_do_not(places):
    user, system, environ = places
    keys = []
    for text in ("", 'link-mode = "copy"\n', 'prerelease = "allow"\n', "[pip]\nno-deps = true\n"):
        user.write_text(text)
        keys.append(identify(SPEC, environ))
    assert keys[0] == keys[1]
    assert len({json.dumps(key) for key in keys}) == 3
    system.write_text('prerelease = "disallow"\n')
    user.write_text('prerelease = "allow"\n')
    assert identify(SPEC, environ) == keys[2]
    assert identify(SPEC, environ | {"UV_NO_CONFIG": "1"}) == keys[0]


@pytest.mark.smoke
def test_lists_are_joined_the_narrower_first_and_paths_start_at_their_file(places):
    user, system, environ = places
    user.write_text('find-links = ["wheels"]\n[pip]\nno-deps = true\npython = "3.9"\n')
    system.write_text('find-links = ["https://h/links"]\ncache-dir = "/c"\n')
    assert configured(environ) == {
        "find-links": [str(user.parent / "wheels"), "https://h/links"],
        "pip": {"no-deps": True},
    }


@pytest.mark.hostile
def test_pip_without_an_index_is_uv_without_one(tmp_path, places, outside):
    pip = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": outside.url}
    store = Store(tmp_path / "s", environ=places[2] | pip)
    with pytest.raises((ResolutionError, NetworkError), match="demo"):
        ensure(SPEC, store=store)
    house = tmp_path / "house"
    house.mkdir()
    wheel = outside.add("demo", "3.0")
    wheel.rename(house / wheel.name)
    found = Store(tmp_path / "s", environ={**store.environ, "PIP_FIND_LINKS": str(house)})
    assert ensure(SPEC, store=found).stamp["packages"] == {"demo": "3.0"}
    assert configured(places[2] | pip | {"UV_INDEX": outside.url}) == {}


@pytest.mark.smoke
def test_what_uv_is_told_by_variables_still_counts_more_than_pip(places):
    user, _, environ = places
    user.write_text('index-url = "https://corp/simple"\n')
    more = {"PIP_INDEX_URL": "https://pip", "PIP_FIND_LINKS": "/wheels"}
    assert index_variables(SPEC, environ | more) == {"UV_FIND_LINKS": "/wheels"}
    assert index_variables(SPEC, environ | more | {"UV_DEFAULT_INDEX": "https://uv"}) == {
        "UV_DEFAULT_INDEX": "https://uv",
        "UV_FIND_LINKS": "/wheels",
    }


@pytest.mark.hostile
def test_the_file_of_a_folder_above_a_project_stays_out(tmp_path, places, index, outside):
    user, _, environ = places
    user.write_text(f'index-url = "{index.url}"\n')
    project = write_project(tmp_path / "p", dependencies=["demo"])
    (tmp_path / "uv.toml").write_text(f'index-url = "{outside.url}"\n')
    built = ensure(
        EnvironmentSpec.project(project, carry=False), store=Store(tmp_path / "s", environ=environ)
    )
    assert built.stamp["packages"] == {"demo": "2.0"}


def test_doctor_shows_the_files_and_the_indexes(places, monkeypatch, capsys, tmp_path):
    user, _, environ = places
    user.write_text('[[index]]\nname = "corp"\nurl = "https://me:secret@corp/simple"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", environ["XDG_CONFIG_HOME"])
    main(["doctor", "--json", "--store", str(tmp_path / "s")])
    out = capsys.readouterr().out
    rows = {row["what"]: row["found"] for row in json.loads(out)}
    assert rows["uv.toml"] == str(user)
    assert "corp" in rows["uv.toml: index"]
    assert "https://corp/simple" in rows["uv.toml: index"]
    assert "secret" not in out


@pytest.mark.hostile
def test_a_projects_own_file_counts_in_place_of_its_table(tmp_path, index, uv_cache):
    """As uv has it: the table of the project file is then only about the project."""
    more = '[tool.uv]\nconstraint-dependencies = ["demo<1"]\n'
    project = write_project(tmp_path / "p", dependencies=["demo"], more=more)
    spec, store = (
        EnvironmentSpec.project(project, carry=False),
        Store(tmp_path / "s", environ=index.environ(uv_cache)),
    )
    keys = []
    for version in ("1.0", "2.0"):
        (project / "uv.toml").write_text(f'# {version}\nconstraint-dependencies = ["demo=={version}"]\n')
        built = ensure(spec, store=store)
        assert built.stamp["packages"] == {"demo": version}
        keys.append(built.key)
    (project / "uv.toml").write_text('constraint-dependencies = ["demo==2.0"]\n')
    assert ensure(spec, store=store).key == keys[1] != keys[0]
