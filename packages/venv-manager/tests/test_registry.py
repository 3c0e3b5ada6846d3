import io
import sys
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


def test_packages_bring_environments_and_a_broken_one_is_named(tmp_path, monkeypatch, registry, caplog):
    for name, body in (
        ("brings", 'ENVIRONMENTS = {"brings.Worker": "uv run --locked"}\n'),
        ("broken", "1 / 0\n"),
    ):
        points = f"[raycrew.actor_environments]\n{name} = {name}:ENVIRONMENTS\n"
        files = {f"{name}.py": body, f"{name}-1.dist-info/entry_points.txt": points}
        _, content = make_wheel(name, "1", files=files)
        zipfile.ZipFile(io.BytesIO(content)).extractall(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.find("brings.Worker") == "uv run --locked"
    assert "broken" in caplog.text
    registry.register("brings.Worker", "uv run")  # what the program says counts more
    assert registry.find("brings.Worker") == "uv run"
