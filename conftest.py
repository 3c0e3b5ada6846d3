"""Tests that need a GPU are deselected where there is none; REQUIRE_GPU=1 lets them run and fail.

Those that need to be root, who alone can be several users, are skipped for others; REQUIRE_ROOT=1 lets them
fail there.

An example of a property test may take long: a busy machine is no fault. Examples are the same each time, as
a submission is not to fail of what another one has left; `--hypothesis-profile=exploring` tries others.
"""

import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("exploring", settings.get_profile("unhurried"), derandomize=False)
settings.load_profile("unhurried")


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or os.environ.get("REQUIRE_GPU") == "1" or has_gpu():
        return
    items[:] = [item for item in items if item not in marked]
    config.hook.pytest_deselected(items=marked)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.fail("this test needs a GPU and none was found (nvidia-smi -L)", pytrace=False)
    if item.get_closest_marker("root") and os.geteuid() != 0:
        if os.environ.get("REQUIRE_ROOT") == "1":
            pytest.fail("this test needs to be root", pytrace=False)
        pytest.skip("only root can be several users (REQUIRE_ROOT=1 lets this fail)")
