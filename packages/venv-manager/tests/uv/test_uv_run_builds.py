"""Real uv, offline, from the small index: what each kind of spec installs."""

import json
import platform
import subprocess
import sys

import pytest

from raycrew.venv_manager import (
    ConflictingExtrasError,
    EnvironmentSpec,
    LockOutdatedError,
    NetworkError,
    ResolutionError,
    SpecError,
    Store,
    UvError,
    ensure,
    parse,
)
from raycrew.venv_manager._store.building import Luggage
from raycrew.venv_manager._uv.process import run_uv
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.testing import make_wheel, write_project


def build(store, spec):
    return ensure(parse(spec).replace(carry=False), store=store)


def packages(environment):
    return dict(environment.stamp["packages"])


def run(environment, code):
    return subprocess.check_output([environment.python, "-c", code], text=True).strip()


@pytest.fixture
def project(tmp_path):
    return write_project(
        tmp_path / "project",
        dependencies=["base"],
        extras={"old": ["demo<2"], "new": ["demo>=2"]},
        groups={"dev": ["leaf"], "test": ["demo"]},
    )


def lock(project, environ):
    run_uv(["lock", "-q", "--project", project], environ=environ)


@pytest.mark.smoke
def test_a_project_without_a_lock_is_locked_beside_the_environment(store, project):
    built = build(store, project)
    assert packages(built) == {"base": "1.0", "leaf": "1.1"}
    assert run(built, "import base; print(base.VERSION)") == "1.0"
    assert sorted(p.name for p in project.iterdir()) == ["pyproject.toml"]
    assert 'name = "leaf"' in (built.path / "pylock.toml").read_text()


def test_extras_groups_and_what_is_left_out(store, project):
    assert packages(build(store, f"uv run --directory {project} --extra old"))["demo"] == "1.0"
    assert packages(build(store, f"uv run --directory {project} --group test"))["demo"] == "2.0"
    assert packages(build(store, f"uv run --directory {project} --only-group test")) == {"demo": "2.0"}
    assert packages(build(store, f"uv run --directory {project} --with demo==1.0 --no-dev"))["demo"] == "1.0"


def test_options_of_the_build_and_of_the_choice_of_versions(store, project):
    """None of the first changes what is installed, nor the key."""
    plain = build(store, f"uv run --directory {project}")
    copied = f"uv run --directory {project} --link-mode copy"
    assert build(store, copied) == plain
    store.remove_folder(plain.path)
    assert build(store, copied).stamp["link_mode"] == "copy"
    compiled = build(store, f"uv run --directory {project} --compile-bytecode --resolution lowest")
    assert list(compiled.path.glob("venv/lib/*/site-packages/base/__pycache__/*.pyc"))
    assert packages(compiled) == {"base": "1.0", "leaf": "1.0"}


def test_an_interpreter_by_path_and_one_that_is_not_there(store, project):
    built = build(store, f"uv run --directory {project} -p {sys.executable}")
    assert built.stamp["python"] == platform.python_version()
    with pytest.raises(ResolutionError, match=r"3\.99"):
        build(store, f"uv run --directory {project} --python 3.99")


def test_an_interpreter_of_another_version(store, project):
    other = next(v for v in ("3.12", "3.13", "3.11") if not platform.python_version().startswith(v))
    try:
        run_uv(["python", "find", "--no-project", other], environ=store.environ)
    except UvError as error:
        pytest.skip(f"there is no other Python here: {error}")
    built = build(store, f"uv run --directory {project} --python {other}")
    assert built.stamp["python"].startswith(other)
    assert run(built, "import base, sys; print(*sys.version_info[:2], sep='.')") == other


def test_an_unknown_extra_says_which_there_are(store, project):
    with pytest.raises(ResolutionError, match=r"defines no extra nope; it defines old, new"):
        build(store, f"uv run --directory {project} --extra nope")


def test_extras_that_contradict_each_other(store, project):
    with pytest.raises(ResolutionError, match="demo"):
        build(store, f"uv run --directory {project} --all-extras")


def test_requirements_that_nobody_wrote_down_are_told_with_who_added_them(store, project, monkeypatch):
    with pytest.raises(ResolutionError, match="demo") as error:
        build(store, f"uv run --directory {project} --with demo==9.0")
    assert "raycrew added" not in str(error.value)
    monkeypatch.setattr(
        "raycrew.venv_manager.provision._resolving.request.luggage", lambda: Luggage(ray="2.60.0")
    )
    said = r"(?s)you require\s+ray==2\.60\.0.*raycrew added ray==2\.60\.0: what this driver runs"
    with pytest.raises(ResolutionError, match=said):
        ensure(EnvironmentSpec.requirements(["leaf"]), store=store)


def test_a_committed_lock_decides_the_versions(store, project, environ, index):
    write_project(project, dependencies=["leaf==1.0"])
    lock(project, environ)
    text = (project / "uv.lock").read_text()
    built = build(store, f"uv run --locked --directory {project}")
    assert packages(built) == {"leaf": "1.0"}
    assert (project / "uv.lock").read_text() == text
    assert build(store, f"uv run --directory {project}").key != built.key  # told apart by what was asked for


def test_more_packages_do_not_move_what_a_lock_holds(store, project, environ):
    write_project(project, dependencies=["leaf==1.0"])
    lock(project, environ)
    assert packages(build(store, f"uv run --locked --directory {project} --with base")) == {
        "base": "1.0",
        "leaf": "1.0",
    }
    with pytest.raises(ResolutionError, match="leaf"):
        build(store, f"uv run --locked --directory {project} --with 'leaf>1'")


def test_an_outdated_lock_is_an_error_of_its_own(store, project, environ):
    write_project(project, dependencies=["base"])
    lock(project, environ)
    write_project(project, dependencies=["demo"])
    spec = parse(f"uv run --locked --directory {project}").replace(carry=False)
    for _ in range(2):
        with pytest.raises(LockOutdatedError, match="uv lock"):
            ensure(spec, store=store)
        with pytest.raises(LockOutdatedError, match="uv lock"):
            prepare(spec, store)
    assert packages(build(store, f"uv run --frozen --directory {project}"))["base"] == "1.0"


def test_locked_without_a_lock(store, project):
    with pytest.raises(SpecError, match=r"--locked is asked for, but there is no .*uv\.lock"):
        build(store, f"uv run --locked --directory {project}")


def test_extras_that_a_locked_project_declares_as_conflicting(store, project, environ):
    write_project(
        project, extras={"old": ["demo<2"], "new": ["demo>=2"]},
        more='[tool.uv]\nconflicts = [[{ extra = "old" }, { extra = "new" }]]\n',
    )  # fmt: skip
    with pytest.raises(ConflictingExtrasError, match=r"declares extra old and extra new as conflicting"):
        build(store, f"uv run --all-extras --directory {project}")
    lock(project, environ)
    assert packages(build(store, f"uv run --locked --extra old --directory {project}")) == {"demo": "1.0"}
    assert packages(build(store, f"uv run --locked --extra new --directory {project}")) == {"demo": "2.0"}
    with pytest.raises(ConflictingExtrasError, match="two environments"):
        build(store, f"uv run --locked --extra old --extra new --directory {project}")


def test_what_a_project_excludes_overrides_and_constrains(store, tmp_path):
    project = write_project(
        tmp_path / "p", dependencies=["base[more]"],
        more='[tool.uv]\nexclude-dependencies = ["leaf"]\noverride-dependencies = ["demo==2.0"]\n',
    )  # fmt: skip
    (tmp_path / "uv.toml").write_text('constraint-dependencies = ["base==0.1"]\n')  # a stray one above
    assert packages(build(store, project)) == {"base": "1.0", "demo": "2.0"}


def test_local_sources_are_built_and_counted(store, tmp_path, index):
    lib = write_project(
        tmp_path / "lib", name="lib", dependencies=["leaf"],
        more='[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    )  # fmt: skip
    (lib / "lib.py").write_text("VALUE = 1\n")
    (lib / "backend.py").write_text(BACKEND)
    project = write_project(
        tmp_path / "p", dependencies=["lib"],
        more='[tool.uv.sources]\nlib = { path = "../lib", editable = true }\n',
    )  # fmt: skip
    first = build(store, project)
    assert packages(first) == {"leaf": "1.1", "lib": "0"}
    assert run(first, "import lib; print(lib.VALUE)") == "1"
    (lib / "lib.py").write_text("VALUE = 2\n")
    second = build(store, project)
    assert second.key != first.key
    assert run(second, "import lib; print(lib.VALUE)") == "2"
    lib.rename(tmp_path / "moved")
    (tmp_path / "p" / "pyproject.toml").write_text(
        (tmp_path / "p" / "pyproject.toml").read_text().replace("../lib", "../moved")
    )
    assert run(second, "import lib; print(lib.VALUE)") == "2"  # it does not point at the checkout


BACKEND = """
import pathlib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "lib-0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.write("lib.py")
        info = "lib-0.dist-info/"
        text = "Metadata-Version: 2.1\\nName: lib\\nVersion: 0\\nRequires-Dist: leaf\\n"
        wheel.writestr(info + "METADATA", text)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


def test_the_project_itself_is_installed_where_it_is_a_package(store, tmp_path):
    lib = write_project(
        tmp_path / "lib", name="lib", dependencies=["leaf"], extras={"more": ["demo==1.0"]},
        more='[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    )  # fmt: skip
    (lib / "lib.py").write_text("VALUE = 1\n")
    (lib / "backend.py").write_text(BACKEND)
    built = build(store, f"uv run --extra more --directory {lib}")
    assert packages(built) == {"demo": "1.0", "leaf": "1.1", "lib": "0"}


def test_a_member_of_a_workspace(store, tmp_path, environ):
    root = write_project(
        tmp_path / "root", name="root", more='[tool.uv.workspace]\nmembers = ["members/*"]\n'
    )
    write_project(root / "members" / "one", name="one", dependencies=["demo==1.0"])
    write_project(root / "members" / "two", name="two", dependencies=["demo"])
    assert packages(build(store, f"uv run --package one --directory {root}")) == {"demo": "1.0"}
    with pytest.raises(SpecError, match=r"no package 'three'; it has one, root, two"):
        build(store, f"uv run --package three --directory {root}")
    lock(root, environ)
    assert packages(build(store, f"uv run --locked --package two --directory {root}"))["demo"] == "1.0"


def test_requirements_scripts_and_standard_locks(store, tmp_path, environ):
    (tmp_path / "requirements.txt").write_text("demo==1.0  # old\n")
    assert packages(build(store, tmp_path / "requirements.txt")) == {"demo": "1.0"}
    script = tmp_path / "job.py"
    script.write_text('# /// script\n# requires-python = ">=3.11"\n# dependencies = ["base"]\n# ///\n')
    of_script = build(store, script)
    assert packages(of_script) == {"base": "1.0", "leaf": "1.1"}
    lock_file = tmp_path / "pylock.toml"
    lock_file.write_text((of_script.path / "pylock.toml").read_text())
    assert packages(build(store, lock_file)) == {"base": "1.0", "leaf": "1.1"}
    run_uv(["lock", "-q", "--script", script], environ=environ)
    assert packages(build(store, f"uv run --locked --script {script}")) == {"base": "1.0", "leaf": "1.1"}


def test_a_wheelhouse_needs_no_index(store, tmp_path, environ):
    house = tmp_path / "wheels"
    house.mkdir()
    for version in ("1.0", "1.5"):
        name, content = make_wheel("aired", version)
        (house / name).write_bytes(content)
    nowhere = Store(store.root, environ=environ | {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"})
    spec = EnvironmentSpec.requirements(["aired"], wheelhouse=str(house), carry=False)
    built = ensure(spec, store=nowhere)
    assert packages(built) == {"aired": "1.5"}
    assert run(built, "import aired; print(aired.VERSION)") == "1.5"
    name, content = make_wheel("aired", "1.5", files={"aired/__init__.py": 'VERSION = "1,5"\n'})
    assert len(content) == (house / name).stat().st_size
    (house / name).write_bytes(content)
    rebuilt = ensure(spec, store=nowhere)
    assert rebuilt.key != built.key
    assert run(rebuilt, "import aired; print(aired.VERSION)") == "1,5"


def test_find_links_and_pip_settings_reach_uv(store, tmp_path, environ):
    house = tmp_path / "wheels"
    house.mkdir()
    name, content = make_wheel("piped", "1.0")
    (house / name).write_bytes(content)
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {house}\n")
    piped = Store(store.root, environ=environ | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    spec = EnvironmentSpec.requirements(["piped", "demo"], carry=False)
    assert packages(ensure(spec, store=piped)) == {"demo": "2.0", "piped": "1.0"}
    recipe = piped.recipe(ensure(spec, store=piped).key)
    assert recipe.variables["UV_FIND_LINKS"] == str(house)


def test_an_index_that_cannot_be_reached(store, environ):
    nowhere = {**environ, "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    spec = EnvironmentSpec.requirements(["demo"], carry=False)
    for refused in (spec, spec.replace(offline=True)):
        with pytest.raises(NetworkError, match="could not be reached") as caught:
            ensure(refused, store=Store(store.root, environ=nowhere))
        assert "demo" in caught.value.tail
    assert store.environments() == []


def test_variables_for_the_build_and_an_offline_store(store, tmp_path):
    spec = EnvironmentSpec.requirements(["demo"], environment={"UV_OFFLINE": "1"}, carry=False)
    assert packages(ensure(spec, store=store)) == {"demo": "2.0"}
    stamp = json.loads((ensure(spec, store=store).path / "stamp.json").read_text())
    assert stamp["spec"]["environment"] == [["UV_OFFLINE", "1"]]


def test_environments_share_their_files(store, index):
    index.add("large", "1.0", files={"large/__init__.py": "", "large/data.bin": b"\0" * 2_000_000})
    one = ensure(EnvironmentSpec.requirements(["large"], carry=False), store=store)
    other = ensure(EnvironmentSpec.requirements(["large", "demo"], carry=False), store=store)
    for environment in (one, other):
        if environment.stamp["link_mode"] == "hardlink":
            assert environment.stamp["own_bytes"] < 100_000 < 2_000_000 < environment.stamp["size_bytes"]


def test_a_standard_lock_that_cannot_be_read(store, tmp_path):
    path = tmp_path / "pylock.toml"
    for text in ("packages = [", 'packages = [{ name = "demo", version = "1.0" }]'):
        path.write_text(text)
        with pytest.raises(SpecError, match=r"pylock\.toml is no lock file that can be read"):
            build(store, path)


@pytest.fixture
def lib(tmp_path):
    folder = write_project(
        tmp_path / "lib", name="lib", dependencies=["leaf"],
        more='[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    )  # fmt: skip
    (folder / "lib.py").write_text("VALUE = 1\n")
    (folder / "backend.py").write_text(BACKEND)
    return folder


def rebuilt(store, spec, lib):
    """Whether a changed local source makes another environment, which has the change."""
    first = build(store, spec)
    (lib / "lib.py").write_text("VALUE = 2\n")
    second = build(store, spec)
    return first.key != second.key and run(second, "import lib; print(lib.VALUE)") == "2"


@pytest.mark.parametrize("line", ["./lib", "-e ./lib[more]", "lib @ {uri}"])
def test_local_sources_in_a_requirements_file(store, tmp_path, lib, line):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "nested.txt").write_text("demo  # any\n" + line.format(uri=lib.as_uri()) + "\n")
    (tmp_path / "all.txt").write_text("-r more/nested.txt\n-c pins.txt\n")
    (tmp_path / "pins.txt").write_text("demo==1.0\n")
    built = build(store, tmp_path / "all.txt")
    assert packages(built) == {"demo": "1.0", "leaf": "1.1", "lib": "0"}
    assert rebuilt(store, tmp_path / "all.txt", lib)
    (tmp_path / "pins.txt").write_text("demo==2.0\n")
    assert packages(build(store, tmp_path / "all.txt"))["demo"] == "2.0"


@pytest.mark.hostile
def test_a_local_source_with_extras_in_a_flag(store, lib):
    built = build(store, f"uv run --no-project --directory {lib.parent} --with './lib[more]'")
    assert packages(built) == {"leaf": "1.1", "lib": "0"}


def test_local_sources_of_a_script_and_of_a_standard_lock(store, tmp_path, lib):
    script = tmp_path / "job.py"
    script.write_text(
        '# /// script\n# dependencies = ["lib"]\n# [tool.uv.sources]\n# lib = { path = "lib" }\n# ///\n'
    )
    assert rebuilt(store, script, lib)
    (tmp_path / "pylock.toml").write_text(
        'lock-version = "1.0"\ncreated-by = "x"\n[[packages]]\nname = "lib"\ndirectory = { path = "lib" }\n'
    )
    (lib / "lib.py").write_text("VALUE = 1\n")
    assert rebuilt(store, tmp_path / "pylock.toml", lib)


def test_what_a_requirements_file_or_a_wheelhouse_lacks(store, tmp_path):
    (tmp_path / "all.txt").write_text("-r gone.txt\n")
    with pytest.raises(SpecError, match=r"gone\.txt cannot be read"):
        build(store, tmp_path / "all.txt")
    with pytest.raises(SpecError, match="there is no wheelhouse"):
        ensure(EnvironmentSpec.requirements(["demo"], wheelhouse=str(tmp_path / "gone")), store=store)


def test_a_synced_environment_is_built_again_from_the_recipe_that_it_kept(store, project, environ):
    write_project(project, dependencies=["base"])
    lock(project, environ)
    spec = parse(f"uv run --locked --directory {project}").replace(carry=False)
    built = ensure(spec, store=store)
    assert packages(built) == {"base": "1.0", "leaf": "1.1"}
    assert store.recipe(built.key).lock == (built.path / "pylock.toml").read_text()
    store.remove_folder(built.path)
    assert packages(ensure(spec, store=store)) == packages(built)
