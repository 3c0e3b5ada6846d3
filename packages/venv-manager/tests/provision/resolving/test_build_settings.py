"""What decides what a source is built to is in the key of its wheel, whoever says it."""

import pytest
from local_sources import BACKEND, value, write_package

from raycrew.venv_manager import EnvironmentSpec, Store, ensure
from raycrew.venv_manager.testing import LocalIndex, make_wheel, write_project

pytestmark = pytest.mark.hostile
SETTINGS = "def read(name, settings):\n    return f\"VALUE = {settings.get('value', 0)}\\n\"\n"
NEEDS = "def read(name, settings):\n    import tool\n    return f'VALUE = {tool.VALUE}\\n'\n"


def read_by(text):
    return BACKEND[: BACKEND.index("def read")] + text


def consumer(folder, told):
    sources = '[tool.uv.sources]\ninner = { path = "../inner" }\n'
    return EnvironmentSpec.project(
        write_project(folder, dependencies=["inner"], more=f"[tool.uv]\n{told}\n{sources}"), carry=False
    )


def test_the_settings_of_a_consumer_decide_what_its_source_is_built_to(store, tmp_path):
    write_package(tmp_path / "inner", 0, backend=read_by(SETTINGS))
    for number in (1, 2):
        spec = consumer(tmp_path / f"p{number}", f'config-settings = {{ value = "{number}" }}')
        assert value(ensure(spec, store=store), "inner") == number
    spec = consumer(tmp_path / "p1", 'config-settings-package = { inner = { value = "3" } }')
    assert value(ensure(spec, store=store), "inner") == 3
    without_a_table(tmp_path / "inner")
    assert value(ensure(spec, store=store), "inner") == 3


def without_a_table(folder):
    """As packages of which only the backend says what they are called."""
    project, backend = folder / "pyproject.toml", folder / f"{folder.name}_backend.py"
    project.write_text(project.read_text()[project.read_text().index("[build-system]") :])
    said = backend.read_text().replace(
        "project = tomllib", f'project = {{"name": "{folder.name}"}} or tomllib'
    )
    backend.write_text(said)


@pytest.fixture
def tools(index):
    for version in ("1", "2"):
        index.add("tool", version, files={"tool.py": f"VALUE = {version}\n"})
    return index


def test_constraints_of_builds_decide_what_a_source_is_built_to(store, tmp_path, tools):
    write_package(tmp_path / "inner", 0, backend=read_by(NEEDS), needs=["tool"])
    for number in (2, 1):
        spec = consumer(tmp_path / f"p{number}", f'build-constraint-dependencies = ["tool=={number}"]')
        assert value(ensure(spec, store=store), "inner") == number


def test_what_a_build_needs_more_decides_what_a_source_is_built_to(store, tmp_path, tools):
    write_package(tmp_path / "inner", 0, backend=read_by(NEEDS))
    for number in (1, 2):
        told = f'extra-build-dependencies = {{ inner = ["tool=={number}"] }}'
        assert value(ensure(consumer(tmp_path / f"p{number}", told), store=store), "inner") == number


@pytest.mark.parametrize("kind", ["with a table", "without", "installed here, too"])
def test_a_local_source_that_a_build_needs_counts(store, tmp_path, kind):
    tool = "iniconfig" if kind == "installed here, too" else "tool"
    write_package(tmp_path / tool, 1)
    if kind == "without":
        without_a_table(tmp_path / tool)
    sources = f'[tool.uv.sources]\n{tool} = {{ path = "../{tool}" }}\n'
    backend = read_by(NEEDS.replace("tool", tool))
    write_package(tmp_path / "inner", 0, backend=backend, needs=[tool], more=sources)
    spec = EnvironmentSpec.requirements([str(tmp_path / "inner")], carry=False)
    for number in (1, 2):
        (tmp_path / tool / f"{tool}.py").write_text(f"VALUE = {number}\n")
        assert value(ensure(spec, store=store), "inner") == number


@pytest.mark.parametrize("by", ["place", "name"])
def test_a_local_source_that_a_build_needs_more_counts(store, tmp_path, by):
    write_package(tmp_path / "tool", 1)
    write_package(tmp_path / "inner", 0, backend=read_by(NEEDS))
    needed = "tool" if by == "name" else f"tool @ {(tmp_path / 'tool').as_uri()}"
    spec = consumer(tmp_path / "p", f'extra-build-dependencies = {{ inner = ["{needed}"] }}')
    with (tmp_path / "p" / "pyproject.toml").open("a") as file:
        file.write('tool = { path = "../tool" }\n' if by == "name" else "")
    for number in (1, 2):
        (tmp_path / "tool" / "tool.py").write_text(f"VALUE = {number}\n")
        assert value(ensure(spec, store=store), "inner") == number


def test_a_local_source_that_a_compiled_one_needs_counts(store, tmp_path):
    write_package(tmp_path / "tool", 1)
    sources = '[tool.uv.sources]\ntool = { path = "../tool" }\n'
    compiled = read_by(NEEDS).replace('"RECORD", "")', '"RECORD", ""); wheel.writestr("_inner.so", "")')
    write_package(tmp_path / "inner", 0, backend=compiled, needs=["tool"], more=sources)
    spec = EnvironmentSpec.requirements([str(tmp_path / "inner")], carry=False)
    for number in (1, 2):
        (tmp_path / "tool" / "tool.py").write_text(f"VALUE = {number}\n")
        assert value(ensure(spec, store=store), "inner") == number


@pytest.mark.parametrize("by", ["user", "project"])
def test_settings_count_beside_a_wheelhouse(tmp_path, uv_cache, by):
    house = tmp_path / "house"
    house.mkdir()
    for version in ("1.0", "2.0"):
        name, content = make_wheel("demo", version)
        (house / name).write_bytes(content)
    user = tmp_path / "user" / "uv" / "uv.toml"
    user.parent.mkdir(parents=True)
    environ = LocalIndex(tmp_path / "none").environ(uv_cache) | {"XDG_CONFIG_HOME": str(tmp_path / "user")}
    store = Store(tmp_path / "store", environ=environ)
    for version in ("1.0", "2.0"):
        told = f'constraint-dependencies = ["demo=={version}"]\n'
        user.write_text(told if by == "user" else "")
        more = f"[tool.uv]\n{told}" if by == "project" else ""
        project = write_project(tmp_path / "p", dependencies=["demo"], more=more)
        spec = EnvironmentSpec.project(project, wheelhouse=str(house), carry=False)
        assert ensure(spec, store=store).stamp["packages"] == {"demo": version}
    user.write_text('index-url = "https://h/simple"\n' + user.read_text())
    assert ensure(spec, store=store).key in [e.key for e in store.environments()][:1]
