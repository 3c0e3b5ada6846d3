"""However a folder is written in a list or behind a flag, uv's reading of it and ours agree."""

import sys
from pathlib import Path

import pytest
from local_sources import write_package

from raycrew.venv_manager import EnvironmentSpec, Store, parse
from raycrew.venv_manager.provision import prepare

pytestmark = pytest.mark.hostile
LINES = [
    "./ed[x]", "-e ./ed[x]", "-e ed", "--editable=ed[x]", "file:ed", "ed @ file:./ed", "ed @ ./ed",
    "ed[x] @ ./ed ; python_version > '3'", "./ed[x] ; python_version > '3'", "${HERE}/ed[x]", "./ed#egg=ed",
    "ed[x] @ file://${HERE}/ed", "ed @ file://localhost${HERE}/ed", "ed @ ${PROJECT_ROOT}/ed",
    "ed[x] @ ${PROJECT_ROOT}/ed", "./ed  # the one", "ed @ file:///${PROJECT_ROOT}/ed",
]  # fmt: skip
FLAGS = ["--with './ed[x]'", "--with-editable ./ed", "--with-editable ed[x]", "--with 'ed @ ./ed,demo<2'"]


@pytest.fixture
def here(tmp_path):
    write_package(tmp_path / "ed", 1, extras={"x": ["leaf"]})
    return tmp_path


def needs(recipe):
    return {line.split('"')[1] for line in recipe.lock.splitlines() if line.startswith("name = ")}


def made(spec, store):
    """Key and packages, before and after an edit."""
    recipe = prepare(spec, store)
    assert list(recipe.wheels) == ["ed-0-py3-none-any.whl"]
    (Path(store.root.parent) / "ed" / "ed.py").write_text("VALUE = 2\n")
    assert prepare(spec, store).key != recipe.key
    return needs(recipe)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_list(store, here, line):
    (here / "with space.txt").write_text(f"{line}\n")
    (here / "all.txt").write_text('-r "with space.txt"\n')
    told = Store(store.root, environ={**store.environ, "HERE": str(here)})
    found = made(EnvironmentSpec.requirements(here / "all.txt", carry=False), told)
    assert found == ({"ed", "leaf"} if "[x]" in line else {"ed"})


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag(store, here, flag):
    spec = parse(f"uv run --no-project {flag}", here).replace(carry=False)
    assert made(spec, store) >= ({"ed", "leaf"} if "[x]" in flag else {"ed"})


@pytest.mark.parametrize("written", ["./mine", "mine", "mine/bin/python", "{here}/mine/bin/python"])
def test_an_interpreter_by_a_relative_path(store, here, written):
    (here / "mine" / "bin").mkdir(parents=True)
    (here / "mine" / "bin" / "python").symlink_to(sys.executable)
    (here / "mine" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    spec = parse(f"uv run --no-project --with demo --python {written.format(here=here)}", here)
    assert Path(spec.python).is_absolute()
    assert needs(prepare(spec.replace(carry=False), store)) == {"demo"}
