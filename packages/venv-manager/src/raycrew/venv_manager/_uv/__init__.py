"""The only place that runs uv, and what uv is told: indexes and command lines."""

from raycrew.venv_manager._uv.access import access_here, access_of, need_credentials
from raycrew.venv_manager._uv.configuration import configuration_files, configured, told_to_uv
from raycrew.venv_manager._uv.indexes import build_environment, index_variables
from raycrew.venv_manager._uv.order import PLACES, serving
from raycrew.venv_manager._uv.process import OLDEST, find_uv, run_uv, uv_version
from raycrew.venv_manager._uv.uv_run import parse

__all__ = [
    "OLDEST",
    "PLACES",
    "access_here",
    "access_of",
    "build_environment",
    "configuration_files",
    "configured",
    "find_uv",
    "index_variables",
    "need_credentials",
    "parse",
    "run_uv",
    "serving",
    "told_to_uv",
    "uv_version",
]
