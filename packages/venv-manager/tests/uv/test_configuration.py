"""The user's and the system's `uv.toml`, and pip's configuration beside them."""

import json
import os
import shutil

import pytest

from raycrew.venv_manager import EnvironmentSpec, NetworkError, ResolutionError, Store, ensure, identify
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._store.building import Recipe
from raycrew.venv_manager._uv import configured, index_variables, serving, told_to_uv
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


@pytest.mark.smoke
def test_of_the_systems_files_the_first_counts_alone(places, tmp_path):
    _, system, environ = places
    other = tmp_path / "other" / "uv" / "uv.toml"
    other.parent.mkdir(parents=True)
    system.write_text('prerelease = "allow"\n')
    other.write_text('resolution = "lowest"\n')
    environ |= {"XDG_CONFIG_DIRS": f"{tmp_path / 'other'}:{system.parent.parent}"}
    assert configured(environ) == {"resolution": "lowest"}
    other.unlink()
    assert configured(environ) == {"prerelease": "allow"}


@pytest.mark.smoke
def test_what_a_spec_itself_tells_uv_comes_first_and_only_from_where_it_says_so(
    places, tmp_path, monkeypatch
):
    user, _, environ = places
    user.write_text('prerelease = "disallow"\nresolution = "lowest"\n')
    project = write_project(tmp_path / "p", more='[tool.uv]\nprerelease = "allow"\nfind-links = ["w"]\n')
    (project / "job.py").write_text('# /// script\n# [tool.uv]\n# prerelease = "explicit"\n# ///\n')
    (project / "pylock.toml").write_text('lock-version = "1.0"\n')
    monkeypatch.chdir(project)
    both = {"resolution": "lowest"}
    for spec, told in (
        (EnvironmentSpec.project(project), {"prerelease": "allow", "find-links": [str(project / "w")]}),
        (EnvironmentSpec.script(project / "job.py"), {"prerelease": "explicit"}),
        (EnvironmentSpec.pylock(project / "pylock.toml"), {"prerelease": "disallow"}),
        (SPEC, {"prerelease": "disallow"}),
    ):
        assert told_to_uv(spec, environ) == told | both, spec.kind


@pytest.mark.smoke
def test_an_index_that_a_spec_names_is_asked_though_pip_has_none(places):
    environ = places[2] | {"PIP_NO_INDEX": "1"}
    assert told_to_uv(SPEC, environ) == {"no-index": True}
    for named in ({"default_index": "https://i/simple"}, {"indexes": ("https://i/simple",)}):
        assert told_to_uv(SPEC.replace(**named), environ) == {}


@pytest.mark.smoke
def test_without_an_index_only_files_beside_it_are_shown(places):
    user, _, environ = places
    user.write_text('no-index = true\nindex-url = "https://corp/simple"\nfind-links = ["wheels"]\n')
    assert [place.url for place in serving(environ)] == [str(user.parent / "wheels")]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("written", "name", "url"),
    [
        ("mine=https://i/simple", "mine", "https://i/simple"),
        ("https://i/simple", "", "https://i/simple"),
        ("https://i/simple?a=b", "", "https://i/simple?a=b"),
        ("mine=https://i/simple?a=b", "mine", "https://i/simple?a=b"),
    ],
)
def test_the_name_of_an_index_is_told_from_its_address(places, written, name, url):
    first = serving(places[2] | {"UV_INDEX": written})[0]
    assert (first.name, first.url) == (name, url)


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


def shown_by_doctor(capsys, tmp_path):
    main(["doctor", "--json", "--store", str(tmp_path / "s")])
    out = capsys.readouterr().out
    return {row["what"]: row["found"] for row in json.loads(out)}, out


def test_doctor_shows_which_index_serves_what(places, monkeypatch, capsys, tmp_path):
    user, system, environ = places
    user.write_text(
        'find-links = ["wheels"]\n'
        '[[index]]\nname = "corp"\nurl = "https://me:hidden@corp/simple"\n'
        '[[index]]\nname = "pinned"\nurl = "https://pinned/simple"\nexplicit = true\n'
    )
    system.write_text('extra-index-url = ["https://more/simple"]\nindex-url = "https://base/simple"\n')
    for name in (name for name in os.environ if name.startswith(("UV_", "PIP_"))):
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.setenv("UV_INDEX", "mine=https://mine/simple")
    monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "hidden")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine more login me password hidden\n")
    rows, out = shown_by_doctor(capsys, tmp_path)
    assert [rows[f"index {i}"] for i in range(1, 7)] == [
        "mine https://mine/simple: all packages; said by UV_INDEX; credentials: UV_INDEX_MINE_PASSWORD",
        f"corp https://corp/simple: all packages; said by {user}; credentials: in its URL",
        f"https://more/simple: all packages; said by {system}; credentials: netrc, or uv's own store",
        f"https://base/simple: what no other has (default); said by {system}; credentials: none",
        f"{user.parent / 'wheels'}: files beside the indexes (find-links); said by {user}",
        "pinned https://pinned/simple: only packages that name it (explicit); "
        f"said by {user}; credentials: none",
    ]
    assert "index 7" not in rows and rows["uv.toml"] == str(system)
    assert "hidden" not in out


def test_doctor_shows_what_pip_is_configured_with(places, monkeypatch, capsys, tmp_path):
    for name in (name for name in os.environ if name.startswith(("UV_", "PIP_"))):
        monkeypatch.delenv(name)
    for name, value in places[2].items():
        if name.startswith(("UV_", "XDG_", "HOME")):
            monkeypatch.setenv(name, value)
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://me:hidden@pip/simple\nextra-index-url = https://extra/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    rows, out = shown_by_doctor(capsys, tmp_path)
    assert rows["index 1"].startswith("https://extra/simple: all packages; said by pip's configuration")
    assert rows["index 2"].startswith("https://pip/simple: what no other has (default); said by pip's")
    assert rows["UV_INDEX_STRATEGY"] == "unsafe-best-match" and "hidden" not in out
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "index 1" not in shown_by_doctor(capsys, tmp_path)[0]
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_NO_INDEX")
    rows, _ = shown_by_doctor(capsys, tmp_path)
    assert rows["index 1"].startswith("https://pypi.org/simple: what no other has (default); said by uv")


@pytest.mark.hostile
def test_uv_asks_the_indexes_in_the_order_that_is_shown(places, tmp_path):
    user, system, environ = places
    urls, folders = {}, {}
    for version in range(1, 7):
        index = LocalIndex(tmp_path / f"index{version}")
        index.add("demo", f"{version}.0")
        urls[version], folders[version] = index.url, index.folder / "demo"
    user.write_text(
        f'index-url = "{urls[5]}"\nextra-index-url = ["{urls[4]}"]\n[[index]]\nurl = "{urls[3]}"\n'
    )
    system.write_text(f'[[index]]\nurl = "{urls[1]}"\n[[index]]\nurl = "{urls[2]}"\ndefault = true\n')
    environ |= {"UV_INDEX": f"mine={urls[6]}"}
    shown = [place.url for place in serving(environ)]
    assert len(shown) == 5 and shown[0] == urls[6]
    for url in shown:
        recipe = prepare(SPEC, Store(tmp_path / "s", environ=environ), force=True)
        (version,) = [v for v, place in urls.items() if place == url]
        assert f'version = "{version}.0"' in recipe.lock, shown
        shutil.rmtree(folders[version])


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
