"""The only place that runs uv, and what uv is told: indexes and command lines."""

from raycrew.venv_manager._uv.access import Access, access_here, access_of, need_credentials
from raycrew.venv_manager._uv.indexes import build_environment, index_variables
from raycrew.venv_manager._uv.process import OLDEST, find_uv, run_uv, uv_version
from raycrew.venv_manager._uv.uv_run import parse

__all__ = [
    "OLDEST",
    "Access",
    "access_here",
    "access_of",
    "build_environment",
    "find_uv",
    "index_variables",
    "need_credentials",
    "parse",
    "run_uv",
    "uv_version",
]
