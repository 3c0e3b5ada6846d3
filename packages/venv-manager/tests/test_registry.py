import io
import os
import subprocess
import sys
import textwrap
import zipfile

import pytest

from raycrew.venv_manager import (
    ACTOR_ENVIRONMENT_REGISTRY,
    PY_EXECUTABLES,
    ActorEnvironmentRegistry,
    EnvironmentSpec,
    SpecError,
    get_actor_python_env,
    register_actor_environment,
)
from raycrew.venv_manager.testing import make_wheel

pytestmark = pytest.mark.smoke


@pytest.fixture
def registry():
    return ActorEnvironmentRegistry()


def test_a_class_of_its_own_counts_before_its_packages(registry):
    registry.register("pkg.*", "uv run")
    registry.register("pkg.sub.*", PY_EXECUTABLES.BASE)
    registry["pkg.sub.Special"] = PY_EXECUTABLES.VLLM
    assert registry.find("pkg.other.Worker") == "uv run"
    assert registry.find("pkg.sub.deep.Worker") == "uv run --locked"
    assert registry.find("pkg.sub.Special") == "uv run --locked --extra vllm"
    assert registry.find("pkgs.Worker") is None
    del registry["pkg.sub.Special"]
    assert registry.find("pkg.sub.Special") == "uv run --locked"
    assert sorted(registry) == ["pkg.*", "pkg.sub.*"]
    assert len(registry) == 2


@pytest.mark.parametrize("name", ["", "a b", "pkg..Worker", "*", "pkg.*.Worker", "1pkg.Worker"])
def test_names_that_are_none(registry, name):
    with pytest.raises(SpecError, match="full name"):
        registry.register(name, "uv run")


def test_the_registry_of_the_process():
    fqn = "tests_of_registry.Worker"
    with pytest.raises(KeyError, match="register_actor_environment"):
        get_actor_python_env(fqn)
    register_actor_environment(fqn, EnvironmentSpec.requirements(["demo"]))
    try:
        assert get_actor_python_env(fqn) == EnvironmentSpec.requirements(["demo"])
        assert fqn in ACTOR_ENVIRONMENT_REGISTRY
    finally:
        ACTOR_ENVIRONMENT_REGISTRY.unregister(fqn)
    assert sys.executable == PY_EXECUTABLES.SYSTEM


def install(folder, name, body):
    """Put a distribution into a folder, of one module that brings environments."""
    points = f"[raycrew.actor_environments]\n{name} = {name}:ENVIRONMENTS\n"
    files = {f"{name}.py": body, f"{name}-1.dist-info/entry_points.txt": points}
    _, content = make_wheel(name, "1", files=files)
    zipfile.ZipFile(io.BytesIO(content)).extractall(folder)


def test_packages_bring_environments_and_a_broken_one_is_named(tmp_path, monkeypatch, registry, caplog):
    install(tmp_path, "brings", 'ENVIRONMENTS = {"brings.Worker": "uv run --locked"}\n')
    install(tmp_path, "broken", "1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.find("brings.Worker") == "uv run --locked"
    assert "broken" in caplog.text
    registry.register("brings.Worker", "uv run")  # what the program says counts more
    assert registry.find("brings.Worker") == "uv run"


@pytest.mark.hostile
def test_what_a_package_brings_may_register_and_look_itself(tmp_path):
    body = """
        from raycrew.venv_manager import get_actor_python_env, register_actor_environment

        register_actor_environment("registers.First", "uv run --locked")
        ENVIRONMENTS = {"registers.Second": get_actor_python_env("registers.First")}
    """
    install(tmp_path, "registers", textwrap.dedent(body))
    look = "from raycrew.venv_manager import get_actor_python_env as get; print(get('registers.Second'))"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", look], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "uv run --locked\n", done.stderr
