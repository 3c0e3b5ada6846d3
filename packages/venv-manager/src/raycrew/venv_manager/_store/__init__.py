"""The store: one folder per key, published by a stamp; upkeep."""

from raycrew.venv_manager._store.root import CHOICES, SOURCES, make_folder
from raycrew.venv_manager._store.shelf import Shelf
from raycrew.venv_manager._store.stamps import Environment
from raycrew.venv_manager._store.store import Store, check_name
from raycrew.venv_manager._store.upkeep import Drift, Removal, collect, relocated, superseded, verify

__all__ = [
    "CHOICES",
    "SOURCES",
    "Drift",
    "Environment",
    "Removal",
    "Shelf",
    "Store",
    "check_name",
    "collect",
    "make_folder",
    "relocated",
    "superseded",
    "verify",
]
