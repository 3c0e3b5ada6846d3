"""Building one environment: its recipe, the packages that it carries along, probing and inventory."""

from raycrew.venv_manager._store.building.build import PYTHON, VENV, Build, Sync, write_whole
from raycrew.venv_manager._store.building.carry import Luggage, luggage, wheel_of
from raycrew.venv_manager._store.building.content import (
    came_of,
    digest,
    is_compiled,
    members,
    members_of_source,
    read_by_compilers,
    shipped,
    tops_of,
)
from raycrew.venv_manager._store.building.inventory import altered, take
from raycrew.venv_manager._store.building.probing import Expectation, check, probe
from raycrew.venv_manager._store.building.recipe import Recipe, this_platform
from raycrew.venv_manager._store.building.wheels import build_file, pack

__all__ = [
    "PYTHON",
    "VENV",
    "Build",
    "Expectation",
    "Luggage",
    "Recipe",
    "Sync",
    "altered",
    "build_file",
    "came_of",
    "check",
    "digest",
    "is_compiled",
    "luggage",
    "members",
    "members_of_source",
    "pack",
    "probe",
    "read_by_compilers",
    "shipped",
    "take",
    "this_platform",
    "tops_of",
    "wheel_of",
    "write_whole",
]
