import pytest

from raycrew.venv_manager import EnvironmentSpec, SpecError, identify
from raycrew.venv_manager._spec import FILE_VARIABLES
from raycrew.venv_manager._uv.indexes import build_environment, index_variables
from raycrew.venv_manager._uv.pip_settings import pip_settings

pytestmark = pytest.mark.smoke
SPEC = EnvironmentSpec.requirements(["demo"])


@pytest.fixture
def home(tmp_path):
    """A home folder whose pip knows find-links and two more indexes."""
    folder = tmp_path / ".config" / "pip"
    folder.mkdir(parents=True)
    (folder / "pip.conf").write_text(
        "[global]\nfind-links = /a\n  /b\nindex_url = https://main/simple\n"
        "[install]\nextra-index-url = https://x https://y\n"
    )
    return {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "none")}


def test_pip_files_and_variables_are_read_as_pip_reads_them(home, tmp_path):
    found = pip_settings(home, str(tmp_path))
    assert found["index-url"] == "https://main/simple"
    assert (
        pip_settings(home | {"PIP_INDEX_URL": "https://other"}, str(tmp_path))["index-url"] == "https://other"
    )
    assert pip_settings({"PIP_CONFIG_FILE": "/dev/null", **home}, str(tmp_path)) == {
        "config-file": "/dev/null"
    }


def test_what_pip_knows_is_handed_on_to_uv(home):
    assert index_variables(SPEC, home) == {
        "UV_DEFAULT_INDEX": "https://main/simple",
        "UV_INDEX": "https://x https://y",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
    }


def test_what_uv_or_the_spec_says_counts_more(home):
    found = index_variables(SPEC, home | {"UV_DEFAULT_INDEX": "https://uv", "UV_FIND_LINKS": "/c"})
    assert found["UV_DEFAULT_INDEX"] == "https://uv"
    assert found["UV_FIND_LINKS"] == "/c"
    spec = SPEC.replace(default_index="https://spec", indexes=("https://more",), find_links=("/d",))
    found = index_variables(spec, home)
    assert found == {
        "UV_DEFAULT_INDEX": "https://spec",
        "UV_INDEX": "https://more",
        "UV_FIND_LINKS": "/d,/a,/b",
    }


def test_a_wheelhouse_is_all_there_is(home):
    assert index_variables(SPEC.replace(wheelhouse="/wheels"), home) == {"UV_FIND_LINKS": "/wheels"}


@pytest.mark.parametrize("name", sorted(FILE_VARIABLES))
def test_files_that_variables_name_are_found_from_any_folder(home, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    found = build_environment(SPEC, home | {name: "one.txt /abs/two.txt"})
    assert found[name] == f"{tmp_path}/one.txt /abs/two.txt"


def test_the_environment_of_uv_keeps_what_helps_and_drops_what_leads_astray(home):
    given = home | {
        "PATH": "/bin", "HTTPS_PROXY": "http://p", "UV_CACHE_DIR": "/cache", "UV_INDEX_MINE_PASSWORD": "s",
        "VIRTUAL_ENV": "/v", "PYTHONPATH": "/p", "PYTHONDONTWRITEBYTECODE": "1",
        "UV_PROJECT_ENVIRONMENT": "/e", "UV_LOCKED": "1", "UV_CONFIG_FILE": "/dev/null",
    }  # fmt: skip
    found = build_environment(SPEC.replace(environment={"CFLAGS": "-O1"}, offline=True), given)
    for name in ("PATH", "HTTPS_PROXY", "UV_CACHE_DIR", "UV_INDEX_MINE_PASSWORD"):
        assert found[name] == given[name]
    for name in (
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONDONTWRITEBYTECODE",
        "UV_PROJECT_ENVIRONMENT",
        "UV_LOCKED",
        "UV_CONFIG_FILE",
    ):
        assert name not in found
    assert (found["CFLAGS"], found["UV_OFFLINE"], found["UV_COMPILE_BYTECODE"]) == ("-O1", "1", "1")
    assert build_environment(SPEC, home | {"RAYCREW_VENV_OFFLINE": "1"})["UV_OFFLINE"] == "1"
    assert build_environment(SPEC, home | {"UV_COMPILE_BYTECODE": "0"})["UV_COMPILE_BYTECODE"] == "0"


@pytest.mark.hostile
@pytest.mark.parametrize("fault", ["no section", "no text", "no file", "a loop"])
def test_a_configuration_of_pip_that_cannot_be_read_is_an_error(tmp_path, fault):
    """Else the index that it names would be passed over in silence."""
    file = tmp_path / "pip.conf"
    if fault == "no file":
        file.mkdir()
    elif fault == "a loop":
        file.symlink_to(file)
    else:
        file.write_bytes(b"index-url = https://corp\n" if fault == "no section" else b"[global]\nx = \xff\n")
    spec = EnvironmentSpec.requirements(["demo"], carry=False)
    with pytest.raises(SpecError, match=r"pip's configuration .*pip\.conf cannot be read"):
        identify(spec, {"PIP_CONFIG_FILE": str(file)})
    assert identify(spec, {"PIP_CONFIG_FILE": str(tmp_path / "absent")})


@pytest.mark.hostile
def test_a_configuration_of_uv_that_cannot_be_looked_at_is_an_error(tmp_path):
    (tmp_path / "uv").symlink_to(tmp_path / "uv")
    environ = {"PIP_CONFIG_FILE": "/dev/null", "XDG_CONFIG_HOME": str(tmp_path)}
    spec = EnvironmentSpec.requirements(["demo"], carry=False)
    with pytest.raises(SpecError, match=r"uv\.toml cannot be read"):
        identify(spec, environ)
    assert identify(spec, environ | {"UV_NO_CONFIG": "1"})


def test_pip_reads_the_systems_folders_the_first_of_them_last(tmp_path):
    for place, index in (("first", "https://first/simple"), ("second", "https://second/simple")):
        path = tmp_path / place / "pip" / "pip.conf"
        path.parent.mkdir(parents=True)
        path.write_text(f"[global]\nindex-url = {index}\n")
    environ = {"XDG_CONFIG_DIRS": f"{tmp_path / 'first'}:{tmp_path / 'second'}"}
    assert pip_settings(environ, str(tmp_path))["index-url"] == "https://first/simple"
