import subprocess
import sys
import textwrap

import pytest
from builds import SPEC, child_environment

from raycrew.venv_manager import (
    BuildFailedError,
    BuildTimeoutError,
    DiskFullError,
    EnvironmentSpec,
    NetworkError,
    ProbeError,
    ReadOnlyStoreError,
    ResolutionError,
    Store,
    StoreError,
    UvNotFoundError,
    UvVersionError,
    ensure,
)
from raycrew.venv_manager.testing import write_project


def version_in(environment, package):
    code = f"import {package}; print({package}.VERSION)"
    return subprocess.check_output([environment.python, "-c", code], text=True).strip()


@pytest.mark.smoke
def test_builds_once_and_then_answers_from_the_folder(fake_store, fake_uv):
    first = ensure(SPEC, store=fake_store)
    assert sorted(words[0] for words in fake_uv.calls()) == ["pip", "pip", "venv"]
    second = ensure(SPEC, store=fake_store)
    assert second == first
    assert len(fake_uv.calls()) == 3
    assert first.python == fake_store.root / first.key / "venv" / "bin" / "python"
    assert first.stamp["packages"] == {"fake": "1"}
    assert set(first.stamp["seconds"]) == {"resolve_s", "install_s", "inventory_s", "probe_s"}


def test_equal_specs_share_and_others_do_not(fake_store):
    one = ensure(EnvironmentSpec.requirements(["fake", "other"], carry=False), store=fake_store)
    same = ensure(EnvironmentSpec.requirements(["other", "fake", "other"], carry=False), store=fake_store)
    third = ensure(EnvironmentSpec.requirements(["fake"], carry=False), store=fake_store)
    assert same.key == one.key
    assert third.key != one.key


def test_force_builds_anew_with_newly_chosen_versions(fake_store, fake_uv):
    first = ensure(SPEC, store=fake_store)
    again = ensure(SPEC, store=fake_store, force_rebuild=True)
    assert again.key == first.key
    assert again.stamp["created"] > first.stamp["created"]
    assert len(fake_uv.calls("pip compile")) == 2


def test_the_environment_variable_forces_too(fake_store, fake_uv):
    ensure(SPEC, store=fake_store)
    forcing = Store(fake_store.root, environ={**fake_store.environ, "RAYCREW_FORCE_REBUILD_VENVS": "1"})
    ensure(SPEC, store=forcing)
    assert len(fake_uv.calls("venv")) == 2


def test_a_removed_environment_is_built_again_with_the_versions_it_had(fake_store, fake_uv):
    first = ensure(SPEC, store=fake_store)
    fake_store.remove_folder(first.path)
    ensure(SPEC, store=fake_store)
    assert len(fake_uv.calls("pip compile")) == 1
    assert len(fake_uv.calls("venv")) == 2


@pytest.mark.parametrize(
    ("verb", "words", "error"),
    [
        ("pip compile", "  x No solution found when resolving dependencies:", ResolutionError),
        ("pip compile", "error: error sending request for url (https://x/simple/fake/)", NetworkError),
        ("pip compile", "error: unexpected argument '--format' found", UvVersionError),
        ("venv", "error: No interpreter found for Python 3.99", ResolutionError),
        ("venv", "error: No space left on device (os error 28)", DiskFullError),
        ("pip install", "error: Failed to build `thing`\ngcc: not found", BuildFailedError),
    ],
)
def test_each_failure_is_an_error_of_its_own_and_publishes_nothing(fake_store, fake_uv, verb, words, error):
    fake_uv.fail(verb, words)
    with pytest.raises(error) as caught:
        ensure(SPEC, store=fake_store)
    assert words in str(caught.value)
    assert words in caught.value.tail
    assert caught.value.returncode == 2
    assert fake_store.environments() == []
    fake_uv.fail(verb, "")
    assert ensure(SPEC, store=fake_store).python.exists()


@pytest.mark.hostile
def test_a_uv_that_hangs_is_killed(fake_store, fake_uv):
    fake_uv.slow("venv", 300)
    impatient = Store(fake_store.root, environ=fake_store.environ, build_timeout_s=1.0)
    with pytest.raises(BuildTimeoutError, match="did not end within 1 s and was killed"):
        ensure(SPEC, store=impatient)
    assert fake_store.environments() == []


def test_no_uv(tmp_path, fake_store):
    environ = {**fake_store.environ, "RAYCREW_UV": str(tmp_path / "nothing")}
    with pytest.raises(UvNotFoundError, match="RAYCREW_UV"):
        ensure(SPEC, store=Store(fake_store.root, environ=environ))
    assert fake_store.environments() == []


def test_no_uv_beside_this_package_nor_on_the_path_needs_none_for_what_is_there(tmp_path, fake_store):
    project = write_project(tmp_path / "project", dependencies=["fake"])
    (project / "uv.lock").write_text("version = 1\n")
    built = ensure(EnvironmentSpec.project(project, locked=True, carry=False), store=fake_store)
    code = f"""
        import sys
        sys.modules["uv"] = None
        from raycrew.venv_manager import EnvironmentSpec, UvNotFoundError, ensure
        spec = EnvironmentSpec.project({str(project)!r}, locked=True, carry=False)
        print(ensure(spec).key)
        for other in (spec.replace(extras=("x",)), EnvironmentSpec.requirements(["fake"], carry=False)):
            try:
                ensure(other)
            except UvNotFoundError as error:
                print(error)
    """
    environ = child_environment(fake_store) | {"PATH": str(tmp_path)}
    del environ["RAYCREW_UV"]
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True, env=environ)
    assert said.splitlines()[0] == built.key
    assert said.count("pip install uv") == 2
    assert fake_store.environments() == [built]


def test_an_old_uv_is_refused_before_it_builds_anything(tmp_path, fake_store):
    uv = tmp_path / "old-uv"
    uv.write_text(f"#!/bin/sh\necho $1 >>{tmp_path}/asked\necho uv 0.4.30\n")
    uv.chmod(0o755)
    old = Store(fake_store.root, environ={**fake_store.environ, "RAYCREW_UV": str(uv)})
    for _ in range(2):
        with pytest.raises(UvVersionError, match=r"old-uv is uv 0\.4\.30, older than 0\.12"):
            ensure(SPEC, store=old)
    assert (tmp_path / "asked").read_text() == "--version\n"
    uv.write_text("#!/bin/sh\necho something else\n")
    with pytest.raises(UvVersionError, match=r"does not say its version as uv does\nsomething else"):
        ensure(SPEC, store=old)
    assert fake_store.environments() == []


@pytest.mark.hostile
def test_an_environment_that_lacks_a_locked_package_is_not_published(fake_store, fake_uv):
    fake_uv.path.write_text(
        fake_uv.path.read_text().replace("Version: 1", "Version: 2").replace("fake-1", "fake-2")
    )
    with pytest.raises(StoreError, match=r"fake 1 \(2 is there\)"):
        ensure(SPEC, store=fake_store)
    assert fake_store.environments() == []


@pytest.mark.hostile
def test_an_environment_whose_interpreter_fails_is_not_published(fake_store, fake_uv):
    fake_uv.path.write_text(
        fake_uv.path.read_text().replace(f"os.symlink({sys.executable!r}", "os.symlink('/bin/false'")
    )
    with pytest.raises(ProbeError, match="ended with status 1"):
        ensure(SPEC, store=fake_store)
    assert fake_store.environments() == []


WITHOUT_POWERS = """
import ctypes
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, sets)
for which in (0, 1):  # effective, permitted: root may no longer do what modes forbid
    sets[which] &= ~0b10
assert libc.capset(header, sets) == 0
"""


def read_only(folder, code, environ):
    """What code prints in a process for which a folder and all below it are read-only, even if it is root."""
    paths = [folder, *(p for p in folder.rglob("*") if not p.is_symlink())]
    modes = {path: path.stat().st_mode for path in paths}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        return subprocess.check_output(
            [sys.executable, "-c", WITHOUT_POWERS + textwrap.dedent(code)], text=True, env=environ
        )
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.hostile
def test_a_read_only_store_serves_what_it_has(fake_store):
    built = ensure(SPEC, store=fake_store)
    code = f"""
        from raycrew.venv_manager import EnvironmentSpec, ReadOnlyStoreError, Store, ensure
        store = Store({str(fake_store.root)!r})
        print(ensure(EnvironmentSpec.requirements(["fake"], carry=False), store=store).key)
        store.name("alias", {built.key!r})
        try:
            ensure(EnvironmentSpec.requirements(["other"], carry=False), store=store)
        except ReadOnlyStoreError as error:
            print(error)
    """
    output = read_only(fake_store.root, code, fake_store.environ)
    assert output.startswith(built.key)
    assert "RAYCREW_VENV_DIR" in output
    assert not (fake_store.root / "by-name" / "alias").is_symlink()


@pytest.mark.hostile
def test_a_read_only_store_serves_nodes_even_if_its_recipes_are_not_to_be_read(fake_store, fake_uv):
    built = ensure(SPEC, store=fake_store)
    (fake_store.root / "recipes" / f"{built.key}.zip").unlink()
    calls = len(fake_uv.calls())
    code = """
        from raycrew.venv_manager import EnvironmentSpec, ReadOnlyStoreError, create_local_venv_on_each_node
        from raycrew.venv_manager.testing import ThreadNodes
        for name in ("fake", "other"):
            try:
                spec = EnvironmentSpec.requirements([name], carry=False)
                print(create_local_venv_on_each_node(spec, "x", ThreadNodes()))
            except ReadOnlyStoreError as error:
                print(error)
    """
    output = read_only(fake_store.root, code, child_environment(fake_store))
    assert output.splitlines()[0] == str(built.python)
    assert "RAYCREW_VENV_DIR" in output.splitlines()[1]
    assert len(fake_uv.calls()) == calls


@pytest.mark.hostile
def test_a_recipe_is_its_owners_and_a_torn_one_is_made_again(fake_store, fake_uv):
    built = ensure(SPEC, store=fake_store)
    (recipe,) = (fake_store.root / "recipes").iterdir()
    assert recipe.stat().st_mode & 0o777 == 0o600
    recipe.write_bytes(recipe.read_bytes()[:100])
    fake_store.remove_folder(built.path)
    assert ensure(SPEC, store=fake_store).key == built.key
    assert len(fake_uv.calls("pip compile")) == 1
    assert fake_store.recipe(built.key) is not None


@pytest.mark.hostile
@pytest.mark.parametrize(
    "torn", ["", "[]", "{}", "null", '{"lock": "", "packages": {}', '{"lock": 5}', "[" * 10**5]
)
def test_a_damaged_choice_is_made_again(fake_store, fake_uv, torn):
    built = ensure(SPEC, store=fake_store)
    (choice,) = (fake_store.root / "choices").iterdir()
    choice.write_text(torn)
    assert ensure(SPEC, store=fake_store) == built
    assert len(fake_uv.calls("pip compile")) == 2


@pytest.mark.hostile
def test_a_store_that_cannot_be_made(tmp_path, fake_store):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadOnlyStoreError, match="cannot be made"):
        ensure(SPEC, store=Store(tmp_path / "file" / "store", environ=fake_store.environ))


def test_names_are_links_that_follow(fake_store):
    one = ensure(SPEC, store=fake_store)
    other = ensure(EnvironmentSpec.requirements(["other"], carry=False), store=fake_store)
    fake_store.name("pkg.Worker", one.key)
    fake_store.name("pkg.Worker", other.key)
    assert (fake_store.root / "by-name" / "pkg.Worker").resolve() == other.path / "venv"
    for name in ("", "..", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="not a name"):
            fake_store.name(name, one.key)
