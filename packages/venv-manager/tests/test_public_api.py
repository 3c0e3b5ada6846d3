import importlib.metadata
import subprocess
import sys

import pytest

import raycrew.venv_manager as package
from raycrew.venv_manager.protocols import NodeRunner
from raycrew.venv_manager.testing import ThreadNodes

pytestmark = pytest.mark.smoke


def test_all_is_sorted_and_resolves():
    assert package.__all__ == sorted(package.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_ray_is_not_imported():
    code = "import sys, raycrew.venv_manager, raycrew.venv_manager.testing; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_provider_is_found_by_entry_point():
    (point,) = importlib.metadata.entry_points(group="raycrew.environment_providers", name="venv-manager")
    assert point.load() is package.RegistryEnvironmentProvider


def test_nodes_of_tests_fit_the_protocol():
    assert isinstance(ThreadNodes(), NodeRunner)
