"""What tests of builds by several processes share."""

import time

from raycrew.venv_manager import EnvironmentSpec

SPEC = EnvironmentSpec.requirements(["fake"], carry=False)
BUILD = """
import sys
from raycrew.venv_manager import EnvironmentSpec, ensure
print(ensure(EnvironmentSpec.requirements(["fake"], carry=False)).python)
"""


def child_environment(store):
    """What makes a store the default one of a child process."""
    return {**store.environ, "RAYCREW_VENV_DIR": str(store.root)}


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.01)


def key_being_built(store):
    return next(p.name.removesuffix(".lock") for p in store.root.glob("locks/????????????????????????.lock"))


def whole_fake(path):
    """Whether an environment of the fake uv lacks nothing."""
    names = {p.name for p in path.glob("venv/lib/*/site-packages/fake/*.py")}
    return (
        names == {"__init__.py", "part0.py", "part1.py", "part2.py"} and (path / "venv/bin/python").exists()
    )
