import json
import os
import subprocess
import sys
import sysconfig
import time

import pytest

from raycrew.venv_manager import EnvironmentSpec, SpecError, explain, identify
from raycrew.venv_manager._spec import (
    asked,
    base_of,
    choice_of,
    digest,
    identity,
    key_of,
    lock_file,
    project_folder,
    script_sources,
)
from raycrew.venv_manager.testing import make_wheel, write_project

pytestmark = pytest.mark.smoke
ENVIRON = {"PIP_CONFIG_FILE": "/dev/null", "HOME": "/nonexistent"}


def keyed(spec, **environ):
    identity = identify(spec, ENVIRON | environ)
    return key_of(identity), identity


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path / "project", dependencies=["demo"], extras={"a": ["leaf"]})


def test_the_key_is_the_same_each_time_and_fits_a_path(project):
    spec = EnvironmentSpec.project(project)
    assert keyed(spec) == keyed(spec)
    assert keyed(spec)[0].isalnum()
    json.dumps(keyed(spec)[1])


def test_keys_are_none_of_former_layouts():
    assert digest.FORMAT not in (1, 2), "stores have environments of these"


def test_what_decides_the_content_decides_the_key(project, tmp_path):
    spec = EnvironmentSpec.project(project)
    others = [
        keyed(spec.replace(extras=("a",))),
        keyed(spec.replace(python="3.12")),
        keyed(spec.replace(packages=("leaf",))),
        keyed(spec.replace(environment={"CFLAGS": "-O3"})),
        keyed(spec, UV_INDEX="https://i/simple"),
        keyed(spec, UV_FIND_LINKS="/wheels"),
        keyed(spec.replace(carry=False)),
    ]
    assert len({keyed(spec)[0], *(key for key, _ in others)}) == len(others) + 1
    before = keyed(spec)[0]
    (project / "uv.lock").write_text("version = 1\n")
    locked = keyed(spec)[0]
    assert locked != before
    (project / "uv.lock").write_text("version = 2\n")
    assert keyed(spec)[0] != locked


def test_the_platform_counts_and_the_version_of_uv_does_not(project, tmp_path, monkeypatch):
    spec = EnvironmentSpec.project(project)
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho uv 99.1.0\n")
    uv.chmod(0o755)
    before = keyed(spec)[0]
    assert keyed(spec, RAYCREW_UV=str(uv))[0] == before
    monkeypatch.setattr("raycrew.venv_manager._spec.digest._platform", lambda: "linux-riscv64-glibc-2.40")
    assert keyed(spec)[0] != before


def test_what_does_not_decide_the_content_does_not(project, tmp_path):
    spec = EnvironmentSpec.project(project)
    before = keyed(spec, UV_CACHE_DIR="/a", PATH="/x")[0]
    (project / "notes.txt").write_text("not a package, so its folder does not count\n")
    assert keyed(spec, UV_CACHE_DIR="/b", PATH="/y")[0] == before
    project.rename(tmp_path / "moved")
    assert keyed(EnvironmentSpec.project(tmp_path / "moved"))[0] == before


def test_explain_names_each_difference(project):
    spec = EnvironmentSpec.project(project)
    _, one = keyed(spec)
    write_project(project, dependencies=["demo", "more"], extras={"a": ["leaf"]})
    _, other = keyed(spec.replace(python="3.13", extras=("a",)), UV_INDEX="https://i/simple")
    lines = explain(one, other)
    assert [line.split(":")[0] for line in lines] == [
        "files.project", "interpreter", "spec.extras", "variables.UV_INDEX",
    ]  # fmt: skip
    assert 'spec.extras: absent -> ["a"]' in lines
    assert "-> https://i/simple" in lines[-1]
    assert explain(one, one) == []


def test_local_sources_count_file_by_file_but_not_their_litter(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    (lib / "lib.py").write_text("x = 1\n")
    more = '[tool.uv.sources]\nlib = { path = "../lib" }\n'
    spec = EnvironmentSpec.project(write_project(tmp_path / "p", dependencies=["lib"], more=more))
    before = keyed(spec)[0]
    for litter in ("__pycache__/lib.pyc", ".git/HEAD", "build/lib.py", "lib.egg-info/PKG-INFO"):
        (lib / litter).parent.mkdir(exist_ok=True)
        (lib / litter).write_text("litter")
    (lib / ".venv").mkdir()
    (lib / "venv").mkdir()
    (lib / "venv" / "pyvenv.cfg").write_text("")
    assert keyed(spec)[0] == before
    (lib / "lib.py").write_text("x = 2\n")
    assert keyed(spec)[0] != before


def test_sources_count_wherever_they_lie(tmp_path):
    """In folders that are named as build output is, and behind links, even if those lead back."""
    lib = write_project(tmp_path / "lib", name="lib")
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"])
    (lib / "lib" / "build").mkdir(parents=True)
    (lib / "dist").mkdir()
    (lib / "dist" / "__init__.py").write_text("")
    (tmp_path / "shared").mkdir()
    (lib / "linked").symlink_to(tmp_path / "shared")
    (lib / "loop").symlink_to(lib)
    keys = [keyed(spec)[0]]
    for file in (lib / "lib" / "build" / "steps.py", lib / "dist" / "x.py", tmp_path / "shared" / "x.py"):
        file.write_text("")
        keys.append(keyed(spec)[0])
    assert len(set(keys)) == 4


def test_a_wheelhouse_counts_by_what_its_files_hold(tmp_path):
    house = tmp_path / "wheels"
    house.mkdir()
    spec = EnvironmentSpec.requirements(["one"], wheelhouse=str(house))

    def put(name, content):
        fresh = tmp_path / "fresh"
        fresh.write_bytes(content)
        os.utime(fresh, (1, 1))
        fresh.replace(house / name)
        return keyed(spec)[0]

    wheels = [make_wheel("one", "1.0", files={"one.py": f"VALUE = {n}\n"}) for n in (1, 2, 1)]
    assert len({len(content) for _, content in wheels}) == 1
    one, other, again = (put(*wheel) for wheel in wheels)
    assert one == again != other
    source = put("two-1.0.tar.gz", b"not a zip file")
    assert source not in (one, put("two-1.0.tar.gz", b"another one.."))
    put("notes.txt", b"not for uv")
    (house / "two-1.0.tar.gz").unlink()
    assert keyed(spec)[0] == one
    _, with_it = keyed(spec)
    (house / wheels[0][0]).unlink()
    (line,) = explain(keyed(spec)[1], with_it)
    assert line.startswith("wheelhouse.one-1.0-py3-none-any.whl: absent -> ")


@pytest.mark.hostile
@pytest.mark.parametrize("git", [False, True])
@pytest.mark.parametrize("first", ["__pycache__/a.pyc", "a.pyc", "build/a.py", "again"])
def test_what_follows_litter_and_links_that_lead_back_counts(tmp_path, first, git):
    lib = write_project(tmp_path / "lib", name="lib")
    (lib / first).parent.mkdir(exist_ok=True)
    (lib / first).symlink_to(lib) if first == "again" else (lib / first).write_text("litter")
    if git:
        subprocess.run(["git", "init", "-q", lib], check=True)
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"])
    keys = []
    for text in ("x = 1\n", "x = 2\n"):
        (lib / "zlib.py").write_text(text)
        keys.append(keyed(spec)[0])
    assert len(set(keys)) == 2


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({}, {}, True),  # its code alone is another
        ({}, {"dependencies": ["leaf"]}, False),
        ({}, {"extras": {"x": ["leaf"]}}, False),
        ({}, {"more": "# a comment\n"}, True),
        ({"version": None}, {"version": None}, False),  # what its code says may be its version
    ],
)
def test_the_code_of_a_source_chooses_versions_only_if_it_may_say_what_it_needs(
    tmp_path, before, after, same
):
    choices = []
    for number, told in enumerate((before, after)):
        lib = write_project(tmp_path / "lib", name="lib", **{k: v for k, v in told.items() if v is not None})
        if "version" in told:
            file = lib / "pyproject.toml"
            file.write_text(file.read_text().replace('version = "0"', 'dynamic = ["version"]'))
        (lib / "lib.py").write_text(f"x = {number}\n")
        wanted = asked(EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"]), ENVIRON, {})
        choices.append(choice_of(wanted))
        assert choice_of(asked(EnvironmentSpec.requirements(["lib"]), ENVIRON, {})) != choices[-1]
    assert (choices[0] == choices[1]) is same


def test_a_folder_that_only_a_constraint_names_is_no_source(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    (tmp_path / "pins.txt").write_text(f"lib @ {lib.as_uri()}\n")
    for flag, named in (("-c", []), ("-r", ["lib"])):
        (tmp_path / "all.txt").write_text(f"demo\n{flag} pins.txt\n")
        found = asked(EnvironmentSpec.requirements(tmp_path / "all.txt"), ENVIRON, {})
        assert list(found["sources"]) == named


def test_a_variable_counts_for_the_sources_that_name_it(tmp_path):
    for name in ("plain", "asking"):
        keys = '[tool.uv]\ncache-keys = [{ env = "LEVEL" }]\n' if name == "asking" else ""
        lib = write_project(tmp_path / name, name=name, more=keys)
        spec = EnvironmentSpec.requirements([f"{name} @ {lib.as_uri()}"])
        found = [keyed(spec, LEVEL=level)[0] for level in ("1", "2", "1")]
        assert found[0] == found[2] and (found[0] == found[1]) == (name == "plain")
        (lib / "new.py").write_text("")
        assert keyed(spec, LEVEL="1")[0] != found[0]


@pytest.mark.hostile
def test_a_local_wheel_counts_by_its_content(tmp_path):
    keys = []
    for dependency in ("leaf", "base"):
        name, content = make_wheel("one", "1.0", requires=[dependency])
        (tmp_path / name).write_bytes(content)
        keys.append(keyed(EnvironmentSpec.requirements([f"one @ {(tmp_path / name).as_uri()}"]))[0])
    assert len(set(keys)) == 2


def test_of_a_wheelhouse_its_place_and_each_wheel_are_told(tmp_path):
    name, content = make_wheel("one", "1.0")
    (tmp_path / name).write_bytes(content)
    spec = EnvironmentSpec.requirements(["one"])
    lines = explain(keyed(spec)[1], keyed(spec.replace(wheelhouse=str(tmp_path)))[1])
    assert [line.split(":")[0] for line in lines] == ["variables.UV_FIND_LINKS", f"wheelhouse.{name}"]


def test_requirements_with_local_folders_count_them(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}", "demo"])
    before = keyed(spec)[0]
    (lib / "new.py").write_text("")
    assert keyed(spec)[0] != before


def test_a_password_is_neither_counted_nor_kept():
    spec = EnvironmentSpec.requirements(["demo"])
    one = keyed(spec, UV_INDEX="https://me:old@i/simple https://j/simple")
    other = keyed(spec, UV_INDEX="https://me:new@i/simple https://j/simple")
    assert one == other
    assert one[1]["variables"]["UV_INDEX"] == "https://i/simple https://j/simple"


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("UV_EXCLUDE_NEWER", "2026-01-01", "2026-02-01"),
        ("UV_TORCH_BACKEND", "cpu", "cu128"),
        ("UV_INDEX_STRATEGY", "first-index", "unsafe-best-match"),
        ("UV_PRERELEASE", "allow", "disallow"),
        ("UV_NO_BINARY_PACKAGE", "demo", "leaf"),
        ("UV_NO_SUCH_SETTING_YET", "1", "2"),
    ],
)
def test_each_variable_that_reaches_uv_counts(name, one, other):
    spec = EnvironmentSpec.requirements(["demo"])
    assert len({keyed(spec)[0], keyed(spec, **{name: one})[0], keyed(spec, **{name: other})[0]}) == 3
    assert keyed(spec.replace(environment={name: one}))[0] == keyed(spec, **{name: one})[0]


def test_variables_that_say_how_do_not_count():
    spec = EnvironmentSpec.requirements(["demo"])
    how = {
        "UV_HTTP_TIMEOUT": "9", "UV_CONCURRENT_BUILDS": "1", "UV_OFFLINE": "1", "UV_COMPILE_BYTECODE": "0",
        "UV_INDEX_MINE_USERNAME": "me", "UV_INDEX_MINE_PASSWORD": "secret", "UV_PROJECT_ENVIRONMENT": "/e",
    }  # fmt: skip
    assert keyed(spec, **how) == keyed(spec)


@pytest.mark.hostile
def test_a_file_that_a_variable_names_counts_by_its_content(tmp_path):
    pins = tmp_path / "pins.txt"
    spec = EnvironmentSpec.requirements(["demo"])
    keys = [keyed(spec)[0]]
    for text in ("demo<2", "demo<3"):
        pins.write_text(text)
        keys.append(keyed(spec, UV_CONSTRAINT=str(pins))[0])
    assert len(set(keys)) == 3
    moved = pins.rename(tmp_path / "moved.txt")
    assert keyed(spec, UV_CONSTRAINT=str(moved))[0] == keys[-1]


@pytest.mark.hostile
def test_two_local_sources_of_one_folder_name_both_count(tmp_path):
    for side in ("a", "b"):
        (tmp_path / side / "lib").mkdir(parents=True)
        (tmp_path / side / "lib" / "setup.py").write_text(f"name = {side!r}\n")
    named = [f"{side} @ {(tmp_path / side / 'lib').as_uri()}" for side in ("a", "b")]
    spec = EnvironmentSpec.requirements(named)
    keys = [keyed(spec)[0]]
    for side in ("a", "b"):
        (tmp_path / side / "lib" / "new.py").write_text("")
        keys.append(keyed(spec)[0])
    assert len(set(keys)) == 3


@pytest.mark.hostile
def test_hidden_data_of_a_package_counts(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"])
    before = keyed(spec)[0]
    (lib / ".templates").mkdir()
    (lib / ".templates" / ".default").write_text("x")
    assert keyed(spec)[0] != before


@pytest.mark.hostile
def test_an_edit_that_keeps_size_and_time_counts(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    (lib / "lib.py").write_text("x = 1\n")
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"])
    before, facts = keyed(spec)[0], (lib / "lib.py").stat()
    (lib / "lib.py").write_text("x = 2\n")
    os.utime(lib / "lib.py", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert keyed(spec)[0] != before


class Ticking:
    """What `stat` says where the file system's clock stands still."""

    def __init__(self, found, now_ns):
        self.found, self.st_ctime_ns, self.st_mtime_ns = found, now_ns, now_ns

    def __getattr__(self, name):
        return getattr(self.found, name)


@pytest.mark.hostile
def test_edits_within_one_tick_of_a_file_systems_clock_count(tmp_path, monkeypatch):
    lib, now_ns, stat = write_project(tmp_path / "lib", name="lib"), time.time_ns(), os.stat
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 10**6)
    monkeypatch.setattr(os, "stat", lambda *file, **how: Ticking(stat(*file, **how), now_ns))
    spec = EnvironmentSpec.requirements([f"lib @ {lib.as_uri()}"])
    keys = []
    for text in ("x = 1\n", "x = 2\n", "x = 3\n"):
        (lib / "lib.py").write_text(text)
        keys.append(keyed(spec)[0])
    assert len(set(keys)) == 3


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with a local source below its root, and what git ignores in it."""
    root = tmp_path / "checkout"
    lib = write_project(root / "libs" / "lib", name="lib")
    (lib / "lib.py").write_text("x = 1\n")
    (root / ".gitignore").write_text("logs/\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    return lib


@pytest.mark.hostile
def test_what_git_ignores_in_a_checkout_does_not_count(checkout):
    spec = EnvironmentSpec.requirements([f"lib @ {checkout.as_uri()}"])
    before = keyed(spec)[0]
    (checkout / "logs").mkdir()
    (checkout / "logs" / "run.txt").write_text("a line\n")
    assert keyed(spec)[0] == before
    (checkout / "new.py").write_text("not yet added\n")
    added = keyed(spec)[0]
    (checkout / "lib.py").unlink()
    assert len({before, added, keyed(spec)[0]}) == 3


def test_what_a_build_leaves_in_a_checkout_does_not_count_unless_it_is_committed(checkout):
    spec = EnvironmentSpec.requirements([f"lib @ {checkout.as_uri()}"])
    before = keyed(spec)[0]
    for litter in ("build/lib/lib.py", "lib.egg-info/PKG-INFO", "__pycache__/lib.pyc"):
        (checkout / litter).parent.mkdir(parents=True)
        (checkout / litter).write_text("litter")
    assert keyed(spec)[0] == before
    subprocess.run(["git", "-C", checkout, "add", "build"], check=True)
    assert keyed(spec)[0] != before


@pytest.mark.hostile
@pytest.mark.parametrize(
    "line", ['-r "with space.txt"', "-r with space.txt", "-rwith\\ space.txt", "--requirement=${NAME}.txt"]
)
def test_an_included_file_counts_however_it_is_named(tmp_path, line):
    (tmp_path / "all.txt").write_text(line + "  # more\n")
    spec = EnvironmentSpec.requirements(tmp_path / "all.txt")
    keys = []
    for text in ("demo<2", "demo<3"):
        (tmp_path / "with space.txt").write_text(text)
        keys.append(keyed(spec, NAME="with space")[0])
    assert len(set(keys)) == 2


@pytest.mark.hostile
def test_variables_in_requirements_count(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    (tmp_path / "all.txt").write_text("lib @ ${WHERE}\ndemo @ https://${TOKEN}@h/demo-${VERSION}.whl\n")
    spec = EnvironmentSpec.requirements(tmp_path / "all.txt")

    def key(token="t", version="1"):
        return keyed(spec, WHERE=lib.as_uri(), TOKEN=token, VERSION=version)[0]

    before = key()
    assert key(token="rotated") == before != key(version="2")
    (lib / "new.py").write_text("")
    assert key() != before


@pytest.mark.hostile
@pytest.mark.parametrize(
    "line", ["./lib[x]", "-e ./lib[x]", "lib[x] @ ./lib ; python_version > '3'", "-e ./lib"]
)
def test_local_folders_count_with_extras_and_markers(tmp_path, line):
    lib = write_project(tmp_path / "lib", name="lib", extras={"x": []})
    (tmp_path / "all.txt").write_text(line + "\n")
    spec = EnvironmentSpec.requirements(tmp_path / "all.txt")
    before = keyed(spec)[0]
    (lib / "new.py").write_text("")
    assert keyed(spec)[0] != before


def test_the_interpreter_counts_by_name_and_version_and_by_path_by_what_it_is(tmp_path):
    spec = EnvironmentSpec.requirements(["demo"])

    def counted(python):
        return keyed(spec.replace(python=str(python)))[1]["interpreter"]

    _, of_driver = keyed(spec)
    assert of_driver["interpreter"] == f"{sys.implementation.name}-{'.'.join(map(str, sys.version_info[:3]))}"
    assert counted("3.12") == "3.12"
    linked = tmp_path / "venv" / "bin" / "python"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(sys.executable)
    assert counted(sys.executable) == counted(linked) == counted(tmp_path / "venv")
    assert counted(linked).startswith(of_driver["interpreter"] + "-")
    wrapped = tmp_path / "python"
    for moment in (1, 2):
        wrapped.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        wrapped.chmod(0o755)
        os.utime(wrapped, (moment, moment))
        assert counted(wrapped) == counted(linked)
    wrapped.write_text("#!/bin/sh\necho pypy-7.3\n")
    assert counted(wrapped) == "pypy-7.3"
    assert keyed(EnvironmentSpec.interpreter(wrapped))[1]["interpreter"] == str(wrapped)


@pytest.mark.hostile
@pytest.mark.parametrize("text", [None, "", "#!/bin/sh\nexit 3\n", "#!/bin/sh\n"])
def test_a_path_with_no_interpreter_is_refused(tmp_path, text):
    python = tmp_path / "python"
    if text is not None:
        python.write_text(text)
        python.chmod(0o755)
    with pytest.raises(SpecError, match=f"--python {python} cannot be used"):
        keyed(EnvironmentSpec.requirements(["demo"], python=str(python)))


def test_the_platform_names_system_machine_and_c_library():
    platform = keyed(EnvironmentSpec.requirements(["demo"]))[1]["platform"]
    assert platform.startswith(sysconfig.get_platform() + "-")
    assert len(platform.split("-")) >= 4


def test_relative_paths_of_requirements_files_start_at_the_first_ones_folder(tmp_path, monkeypatch):
    for folder in ("here", "there"):
        write_project(tmp_path / folder / "lib", name="lib")
        (tmp_path / folder / "all.txt").write_text("./lib\n")
    (tmp_path / "here" / "nested").mkdir()
    (tmp_path / "here" / "all.txt").write_text("-r nested/more.txt\n")
    (tmp_path / "here" / "nested" / "more.txt").write_text("./lib\n")
    monkeypatch.chdir(tmp_path / "there")
    spec = EnvironmentSpec.requirements(tmp_path / "here" / "all.txt")
    assert base_of(spec) == tmp_path / "here"
    assert base_of(EnvironmentSpec.requirements(["./lib"])) == tmp_path / "there"
    before = keyed(spec)[0]
    (tmp_path / "there" / "lib" / "new.py").write_text("")
    assert keyed(spec)[0] == before
    (tmp_path / "here" / "lib" / "new.py").write_text("")
    assert keyed(spec)[0] != before


def test_local_sources_of_scripts_and_locks_are_found_from_their_files(tmp_path):
    lib = write_project(tmp_path / "lib", name="lib")
    script = tmp_path / "job.py"
    script.write_text(
        '# /// script\n# dependencies = ["lib", "demo"]\n# [tool.uv.sources]\n# lib = { path = "lib" }\n'
        '# demo = { index = "x" }\n# ///\n'
    )
    assert script_sources(script) == [("lib", lib, "")]
    lock = tmp_path / "pylock.toml"
    lock.write_text(
        'lock-version = "1.0"\ncreated-by = "x"\n[[packages]]\nname = "lib"\ndirectory = { path = "lib" }\n'
    )
    specs = [EnvironmentSpec.script(script), EnvironmentSpec.pylock(lock)]
    before = [keyed(spec) for spec in specs]
    assert all(list(identity["sources"]) == ["lib"] for _, identity in before)
    (lib / "new.py").write_text("")
    assert all(keyed(spec)[0] != key for spec, (key, _) in zip(specs, before, strict=True))


def test_the_lock_that_decides_is_the_one_of_the_kind(tmp_path):
    project = write_project(tmp_path / "p")
    spec = EnvironmentSpec.project(project)
    assert lock_file(spec) is None
    (project / "uv.lock").write_text("version = 1\n")
    assert lock_file(spec) == project / "uv.lock"
    script = tmp_path / "job.py"
    script.write_text("# /// script\n# ///\n")
    assert lock_file(EnvironmentSpec.script(script)) is None
    (tmp_path / "job.py.lock").write_text("version = 1\n")
    assert lock_file(EnvironmentSpec.script(script)) == tmp_path / "job.py.lock"
    assert lock_file(EnvironmentSpec.requirements(["demo"])) is None
    assert lock_file(EnvironmentSpec.pylock(project / "uv.lock")) == project / "uv.lock"
    (project / "uv.lock").unlink()
    for flag in ("locked", "frozen"):
        with pytest.raises(SpecError, match=rf"--{flag} is asked for, but there is no .*uv\.lock"):
            lock_file(spec.replace(**{flag: True}))


def test_a_member_of_a_workspace_counts_with_its_workspace(tmp_path):
    root = write_project(tmp_path / "root", name="root", more='[tool.uv.workspace]\nmembers = ["m/*"]\n')
    one = write_project(root / "m" / "one", name="one")
    spec = EnvironmentSpec.project(root, package="one")
    assert project_folder(spec) == one
    keys = [keyed(spec)[0]]
    for folder in (one, root):
        file = folder / "pyproject.toml"
        file.write_text(file.read_text() + "# more\n")
        assert keyed(spec)[0] == keys[-1]
        file.write_text(file.read_text().replace('version = "0"', 'version = "1"'))
        keys.append(keyed(spec)[0])
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("part", "other", "same"),
    [
        ("raycrew", {"raycrew-alpha": "0.1 edited"}, True),
        ("requires", {"raycrew-alpha": ["0.1", "demo"]}, False),
        ("preferred", {"demo": "2"}, False),
        ("ray", "3.0", False),
    ],
)
def test_code_that_is_carried_along_does_not_choose_versions_and_what_it_needs_does(part, other, same):
    carried = {"raycrew": {"raycrew-alpha": "0.1 a"}, "requires": {}, "preferred": {}, "ray": "2.0"}
    spec = EnvironmentSpec.requirements(["demo"])
    one, two = (choice_of(asked(spec, ENVIRON, given)) for given in (carried, carried | {part: other}))
    assert (one == two) is same


def test_what_was_chosen_and_what_local_sources_hold_make_the_identity():
    carried = {"raycrew": {}, "requires": {}, "preferred": {}, "ray": "2.0"}
    wanted = asked(EnvironmentSpec.requirements(["demo"]), ENVIRON, carried)
    made = identity(wanted, {"demo": "1.0"}, {"mine": "abc"})
    assert (made["packages"], made["local"], made["ray"]) == ({"demo": "1.0"}, {"mine": "abc"}, "2.0")
    others = [identity(wanted, {"demo": "1.1"}, {"mine": "abc"}), identity(wanted, {"demo": "1.0"}, {})]
    assert len({key_of(one) for one in (made, *others)}) == 3


def test_the_order_in_which_things_are_told_is_in_no_key():
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert len({key_of(one) for one in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"})}) == 4


@pytest.mark.parametrize("told", ['rev = "2"', 'tag = "1"', 'rev = "1", subdirectory = "b"'])
def test_where_a_source_lies_counts_but_for_its_path(tmp_path, told):
    def of(text):
        more = f'[tool.uv.sources]\ndemo = {{ git = "https://h/repo", {text} }}\n'
        return keyed(EnvironmentSpec.project(write_project(tmp_path / "p", dependencies=["demo"], more=more)))

    assert of(told)[0] != of('rev = "1"')[0]
    assert of('rev = "1"')[0] == of('rev = "1"')[0]


def test_a_spec_asks_for_nothing_that_it_was_not_told():
    spec = EnvironmentSpec.requirements(["demo"])
    assert (spec.offline, spec.carry, spec.locked, spec.frozen) == (False, True, False, False)
    assert (spec.default_groups, spec.only_groups) == (True, False), "as uv has it"
