"""The store: one folder per key, published by a stamp; resolving, upkeep."""

from raycrew.venv_manager._store.request import Request
from raycrew.venv_manager._store.resolution import expectation
from raycrew.venv_manager._store.stamps import Environment
from raycrew.venv_manager._store.store import Store, check_name
from raycrew.venv_manager._store.upkeep import Drift, Removal, collect, relocated, superseded, verify

__all__ = [
    "Drift",
    "Environment",
    "Removal",
    "Request",
    "Store",
    "check_name",
    "collect",
    "expectation",
    "relocated",
    "superseded",
    "verify",
]
