"""What changes while an environment is made never comes out under the key of what was there before."""

import subprocess
import threading

import pytest
from local_sources import BACKEND, value, write_package

from raycrew.venv_manager import EnvironmentSpec, InputsChangedError, Store, ensure
from raycrew.venv_manager._uv import find_uv, run_uv
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.provision._resolving.request import Request
from raycrew.venv_manager.testing import write_project

pytestmark = pytest.mark.hostile


class Meddled:
    """A store whose uv runs a line of shell once, when it is first asked for a command."""

    def __init__(self, folder, environ):
        self.folder, self.uv, self.real = folder, folder / "uv", find_uv(environ)
        self.store = Store(folder / "store", environ=environ | {"RAYCREW_UV": str(self.uv)})
        self.meddle("nothing", ":")

    def meddle(self, command, line, *, always=False):
        (self.folder / "done").unlink(missing_ok=True)
        if not always:
            line = f"[ -e {self.folder}/done ] || {{ touch {self.folder}/done; {line}; }}"
        self.uv.write_text(
            f'#!/bin/sh\necho "$1 $2" >>{self.folder}/asked\ncase "$1 $2" in "{command}"*) {line};; esac\n'
            f'exec {self.real} "$@"\n'
        )
        self.uv.chmod(0o755)

    def asked(self, command):
        return sum(line.startswith(command) for line in (self.folder / "asked").read_text().splitlines())


@pytest.fixture
def meddled(tmp_path, environ):
    return Meddled(tmp_path, environ)


def test_a_list_that_changes_while_versions_are_chosen(meddled, tmp_path):
    file = tmp_path / "all.txt"
    spec = EnvironmentSpec.requirements(file.name and _written(file, "demo==1.0\n"), carry=False)
    meddled.meddle("pip compile", f"echo demo==2.0 >{file}")
    assert ensure(spec, store=meddled.store).stamp["packages"] == {"demo": "2.0"}
    _written(file, "demo==1.0\n")
    assert ensure(spec, store=meddled.store).stamp["packages"] == {"demo": "1.0"}
    assert prepare(spec, meddled.store).key == ensure(spec, store=meddled.store).key


def _written(file, text):
    file.write_text(text)
    return file


def test_a_lock_that_changes_while_it_is_installed(meddled, tmp_path, environ):
    project = write_project(tmp_path / "p", dependencies=["leaf"])
    for version in ("1.1", "1.0"):
        run_uv(["lock", "-q", "--project", project, "-P", f"leaf=={version}"], environ=environ)
        _written(tmp_path / version, (project / "uv.lock").read_text())
    spec = EnvironmentSpec.project(project, locked=True, carry=False)
    meddled.meddle("sync", f"mv {tmp_path}/1.1 {project}/uv.lock")
    assert ensure(spec, store=meddled.store).stamp["packages"] == {"leaf": "1.1"}
    _written(project / "uv.lock", (tmp_path / "1.0").read_text())
    assert ensure(spec, store=meddled.store).stamp["packages"] == {"leaf": "1.0"}


def test_what_changes_each_time_is_an_error_that_says_so(meddled, tmp_path):
    file = _written(tmp_path / "all.txt", "demo\n")
    meddled.meddle("pip compile", f"echo 'leaf  # or' >>{file}; echo leaf >>{file}", always=True)
    with pytest.raises(InputsChangedError, match="changed each time while versions were chosen"):
        ensure(EnvironmentSpec.requirements(file, carry=False), store=meddled.store)
    assert meddled.store.environments() == []


@pytest.fixture
def checkout(tmp_path):
    """A source that ships what git ignores."""
    backend = BACKEND.replace('{name}.py")', '{name}.txt")')
    folder = write_package(tmp_path / "inner", 0, backend=backend)
    (folder / "inner.py").rename(folder / "tracked.py")
    (folder / "inner.txt").write_text("VALUE = 1\n")
    (folder / ".gitignore").write_text("inner.txt\nassets/\n*.json\n*.log\n")
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


def of(folder):
    return EnvironmentSpec.requirements([f"inner @ {folder.as_uri()}"], carry=False)


def test_a_recipe_of_what_changed_since_the_key_was_taken_is_refused(store, checkout):
    request = Request(of(checkout), store)
    request.known()
    identity = request.identity()
    (checkout / "inner.txt").write_text("VALUE = 2\n")
    fresh = Request(of(checkout), store)
    with pytest.raises(InputsChangedError):
        fresh.recipe(identity)
    (checkout / "inner.txt").write_text("VALUE = 1\n")
    assert value(ensure(of(checkout), store=store), "inner") == 1


def test_a_change_between_key_and_build_gives_the_changed_environment(tmp_path, environ, checkout):
    class Edited(Store):
        edits = iter(["VALUE = 2\n"])

        def install(self, *arguments, **options):
            for text in self.edits:
                (checkout / "inner.txt").write_text(text)
            return super().install(*arguments, **options)

    edited = Edited(tmp_path / "store", environ=environ)
    prepare(of(checkout), edited)
    for file in edited.root.glob("recipes/*"):
        file.unlink()
    assert value(ensure(of(checkout), store=edited), "inner") == 2
    (checkout / "inner.txt").write_text("VALUE = 1\n")
    assert value(ensure(of(checkout), store=edited), "inner") == 1


def test_an_edit_of_an_ignored_file_during_a_build_is_seen(meddled, checkout):
    """By the first call, or by the next one."""
    backend = checkout / "inner_backend.py"
    edits = """
    import os
    if not os.path.exists("edited.log"):
        pathlib.Path("edited.log").touch()
        pathlib.Path(f"{name}.txt").write_text("VALUE = 2\\n")
    return """
    backend.write_text(backend.read_text().replace('\n    return f"{name}-0', edits + 'f"{name}-0'))
    ensure(of(checkout), store=meddled.store)
    assert value(ensure(of(checkout), store=meddled.store), "inner") == 2


@pytest.mark.parametrize("how", ["by name", "as it is"])
def test_a_file_that_each_build_writes_is_built_once(meddled, checkout, how):
    backend = checkout / "inner_backend.py"
    makes = 'pathlib.Path("made.json").write_text("7")\n    return pathlib.Path('
    text = backend.read_text().replace("    return pathlib.Path(", "    " + makes)
    if how == "as it is":
        text = text.replace(
            "        wheel.writestr(info", '        wheel.write("made.json")\n        wheel.writestr(info', 1
        )
    backend.write_text(text)
    first = ensure(of(checkout), store=meddled.store)
    assert ensure(of(checkout), store=meddled.store) == first
    built = meddled.asked("build")
    assert ensure(of(checkout), store=meddled.store) == first
    assert meddled.asked("build") == built <= 2


@pytest.mark.parametrize("begins", ["absent", "empty"])
def test_an_ignored_folder_that_begins_empty_counts_once_it_is_filled(store, checkout, begins):
    backend = checkout / "inner_backend.py"
    ships = (
        'sorted((p.name, p.read_text()) for p in pathlib.Path("assets").glob("*"))\n'
        '    text = "".join(content for _, content in found)\n'
        '    return (text or "VALUE = 0\\n") + pathlib.Path('
    )
    backend.write_text(backend.read_text().replace("return pathlib.Path(", "found = " + ships))
    (checkout / "inner.txt").write_text("\n")
    if begins == "empty":
        (checkout / "assets").mkdir()
    assert value(ensure(of(checkout), store=store), "inner") == 0
    (checkout / "assets").mkdir(exist_ok=True)
    (checkout / "assets" / "one.py").write_text("VALUE = 5\n")
    assert value(ensure(of(checkout), store=store), "inner") == 5


def test_an_ignored_file_that_only_the_build_reads_counts(store, checkout):
    backend = checkout / "inner_backend.py"
    reads = "import json; return f\"VALUE = {json.load(open('conf.json'))}\\n\"\n    pathlib.Path("
    backend.write_text(backend.read_text().replace("return pathlib.Path(", reads))
    for number in (1, 2):
        (checkout / "conf.json").write_text(str(number))
        assert value(ensure(of(checkout), store=store), "inner") == number


def test_what_a_source_names_in_its_cache_keys_counts_in_an_ignored_folder(store, checkout):
    backend = checkout / "inner_backend.py"
    finds = 'import json; found = json.load(open("assets/deep/conf.json")); '
    reads = finds + 'return f"VALUE = {found}\\n"\n    pathlib.Path('
    backend.write_text(backend.read_text().replace("return pathlib.Path(", reads))
    project = checkout / "pyproject.toml"
    keys = '["inner.txt", { file = "assets/**/*.json" }, { git = { commit = true } }]'
    project.write_text(f"{project.read_text()}[tool.uv]\ncache-keys = {keys}\n")
    (checkout / "assets" / "deep").mkdir(parents=True)
    (checkout / "assets" / "notes.txt").write_text("aside\n")
    for number in (1, 2):
        (checkout / "assets" / "deep" / "conf.json").write_text(str(number))
        assert value(ensure(of(checkout), store=store), "inner") == number


def test_what_a_source_is_built_with_changes_while_it_is_built(meddled, tmp_path):
    uses = "import tool; return f'VALUE = {tool.VALUE}\\n'\n    pathlib.Path("
    write_package(tmp_path / "tool", 1)
    sources = '[tool.uv.sources]\ntool = { path = "../tool" }\n'
    backend = BACKEND.replace("return pathlib.Path(", uses)
    inner = write_package(tmp_path / "inner", 0, backend=backend, needs=["tool"], more=sources)
    meddled.meddle("build", f"echo VALUE = 2 >{tmp_path}/tool/tool.py")
    assert value(ensure(of(inner), store=meddled.store), "inner") == 2
    (tmp_path / "tool" / "tool.py").write_text("VALUE = 1\n")
    assert value(ensure(of(inner), store=meddled.store), "inner") == 1


def test_what_is_written_all_the_time_beside_a_source_stops_nobody(meddled, checkout):
    meddled.meddle("build", f"date +%N >>{checkout}/run.log", always=True)
    (checkout / "run.log").write_text("begun\n")
    first = ensure(of(checkout), store=meddled.store)
    assert ensure(of(checkout), store=meddled.store) == first


def test_a_source_is_built_by_one_at_a_time(meddled, tmp_path, checkout):
    """As many backends leave files in the source while they build."""
    log = tmp_path / "log"
    builds = f"open({str(log)!r}, 'a').write('begin '); import time; time.sleep(0.3); text = "
    ends = f"\n    open({str(log)!r}, 'a').write('end '); return text"
    backend = checkout / "inner_backend.py"
    text = backend.read_text().replace("return pathlib.Path", builds + "pathlib.Path")
    backend.write_text(
        text.replace(".read_text()\n", f".read_text(){ends}\n").replace("tomllib.loads(text", "")
    )
    specs = [of(checkout).replace(environment={"UV_CONFIG_SETTINGS": n}) for n in ("a=1", "a=2")]
    threads = [threading.Thread(target=prepare, args=(spec, meddled.store)) for spec in (*specs, *specs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text().split() == ["begin", "end"] * 2
