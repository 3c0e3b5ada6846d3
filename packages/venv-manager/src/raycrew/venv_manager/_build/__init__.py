"""Building one environment: its recipe, the packages that it carries along, probing and inventory."""

from raycrew.venv_manager._build.build import PYTHON, VENV, Build, Sync, write_whole
from raycrew.venv_manager._build.carry import Luggage, luggage, wheel_of
from raycrew.venv_manager._build.inventory import altered, take
from raycrew.venv_manager._build.probing import Expectation, check, probe
from raycrew.venv_manager._build.recipe import Recipe, this_platform
from raycrew.venv_manager._build.wheels import build_wheel, pack

__all__ = ["Build", "Expectation", "Luggage", "PYTHON", "Recipe", "Sync", "VENV", "altered", "build_wheel", "check", "luggage", "pack", "probe", "take", "this_platform", "wheel_of", "write_whole"]
