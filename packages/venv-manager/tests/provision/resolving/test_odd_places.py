"""Places may be called anything that a file system allows."""

import pytest
from local_sources import value, write_package

from raycrew.venv_manager import EnvironmentSpec, Store, collect, ensure, verify
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.hostile

ODD = ["with blanks", "ünï-çødé 环境", "100%41", "one#two", "a=b,c;d", "quo'te", "[x]{y}", "q?uestion"]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("form", ["a requirement", "a project", "a requirements file"])
def test_a_source_counts_wherever_it_lies(store, tmp_path, name, form):
    inner = write_package(tmp_path / name / "inner", 1)
    if form == "a requirement":
        spec = EnvironmentSpec.requirements([f"inner @ {inner.as_uri()}"], carry=False)
    elif form == "a project":
        more = '[tool.uv.sources]\ninner = { path = "inner" }\n'
        spec = EnvironmentSpec.project(
            write_project(inner.parent, dependencies=["inner"], more=more), carry=False
        )
    else:
        (inner.parent / "requirements.txt").write_text("./inner\n")
        spec = EnvironmentSpec.requirements(inner.parent / "requirements.txt", carry=False)
    for number in (1, 22):
        (inner / "inner.py").write_text(f"VALUE = {number}\n")
        assert value(ensure(spec, store=store), "inner") == number


@pytest.mark.parametrize("name", ODD)
def test_a_store_wherever_it_lies(tmp_path, environ, name):
    (tmp_path / "link").symlink_to(tmp_path / name)
    (tmp_path / name).mkdir()
    inner = write_package(tmp_path / "inner", 5)
    spec = EnvironmentSpec.requirements([f"inner @ {inner.as_uri()}", "base"], carry=False)
    for root in (tmp_path / name / "store", tmp_path / "link" / "store"):
        store = Store(root, environ=environ)
        built = ensure(spec, store=store)
        assert value(built, "inner") == 5
        assert verify(store, built, contents=True).ok
        assert not any(row.removed for row in collect(store, max_bytes=0))
