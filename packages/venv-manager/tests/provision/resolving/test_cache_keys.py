"""What a source names among its `cache-keys` counts, of whatever kind it is, or is refused by its name."""

import re
import subprocess

import pytest
from local_sources import BACKEND, value, write_package

from raycrew.venv_manager import EnvironmentSpec, SpecError, Store, ensure, identify

pytestmark = pytest.mark.hostile


def of(folder, key, says, more=""):
    """A package whose module says what a Python expression gives while it is built."""
    says = f"import os, subprocess; return 'VALUE = ' + str({says}) + '\\n'\n    pathlib.Path("
    backend = BACKEND.replace("return pathlib.Path(", says).replace('"RECORD", "")', f'"RECORD", ""){more}')
    keys = f"[tool.uv]\ncache-keys = [{key}]\n"
    write_package(folder, 0, backend=backend, more=keys)
    return EnvironmentSpec.requirements([f"{folder.name} @ {folder.as_uri()}"], carry=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["LEVEL", "X_API_KEY"])
def test_a_variable(tmp_path, environ, name, compiled):
    more = '; wheel.writestr("_inner.so", "")' if compiled else ""
    spec = of(tmp_path / "inner", f'{{ env = "{name}" }}', f'os.environ["{name}"]', more)
    for number in (31337313373133731337, 27182818284590452353):  # as no time or size is
        store = Store(tmp_path / "store", environ=environ | {name: str(number)})
        assert value(ensure(spec, store=store), "inner") == number
        declaring = spec.replace(environment={name: str(number + 1)})
        assert value(ensure(declaring, store=store), "inner") == number + 1
        for file in store.root.rglob("*.json") if name == "X_API_KEY" else ():
            assert str(number) not in file.read_text(errors="replace")


ASKS = {
    "commit": "int(subprocess.check_output(['git', 'rev-list', '--count', 'HEAD']))",
    "tags": "len(subprocess.check_output(['git', 'tag']).split())",
}


@pytest.mark.parametrize("what", ASKS)
def test_the_commit_and_the_tags(store, tmp_path, what):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    spec = of(tmp_path / "inner", f"{{ git = {{ {what} = true }} }}", ASKS[what])
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for number in (1, 2):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
        subprocess.run([*git, "tag", f"v{number}"], check=True)
        assert value(ensure(spec, store=store), "inner") == number


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("../shared/conf.txt", "../shared/conf.txt"),
        ("../shared/*.{json,txt}", "../shared/conf.txt"),
        ("assets/*.{json,txt}", "assets/conf.txt"),
        ("*.txt", "assets/conf.txt"),
        ("conf.{json,txt}", "assets/conf.txt"),
        ("{assets,other}/c{o,a{b,}}nf.txt", "assets/conf.txt"),
        ("build/conf.txt", "build/conf.txt"),
    ],
)
def test_a_file(store, tmp_path, key, place):
    reads = f"int(pathlib.Path('{place}').read_text())".replace("'", '"')
    spec = of(tmp_path / "inner", f'{{ file = "{key}" }}', reads)
    subprocess.run(["git", "init", "-q", tmp_path / "inner"], check=True)
    (tmp_path / "inner" / ".gitignore").write_text("assets/\nbuild/\n")
    file = tmp_path / "inner" / place
    file.parent.mkdir()
    for number in (1, 2):
        file.write_text(str(number))
        assert value(ensure(spec, store=store), "inner") == number


@pytest.mark.parametrize(
    "key", ['{ package = "x" }', "{ file = 5 }", '"!x"', "{ git = { head = true } }", "5"]
)
def test_what_cannot_be_counted_is_refused_by_name(tmp_path, environ, key):
    spec = of(tmp_path / "inner", key, "0")
    with pytest.raises(SpecError, match=re.escape("inner/pyproject.toml names ") + ".* among its cache-keys"):
        identify(spec, environ)
