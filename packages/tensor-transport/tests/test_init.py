import importlib.metadata
import subprocess
import sys

import pytest

import raycrew.tensor_transport as package


def test_public_names_are_sorted_and_resolve():
    assert list(package.__all__) == sorted(package.__all__)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_nothing_heavy_is_imported_before_it_is_used():
    """Ray, NIXL, vLLM and servers are imported by who needs them: a missing one is a reason, not a crash."""
    wings = ("", ".transports", ".weights", ".process_groups", ".backends", ".integrations", ".testing")
    statement = "import sys, " + ", ".join(f"raycrew.tensor_transport{wing}" for wing in wings)
    heavy = {"ray", "nixl", "vllm", "transformers", "safetensors", "aiohttp", "tensordict"}
    code = f"{statement}; print(*({heavy} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.split() == []


def test_an_engine_of_vllm_finds_it_by_entry_point_and_nobody_else_needs_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="raycrew")
    register = point.load()
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        register()
