"""From a spec to a recipe: what is asked for, what uv chooses, and what local sources are built to."""

from raycrew.venv_manager.provision._resolving.request import Request
from raycrew.venv_manager.provision._resolving.resolution import expectation

__all__ = ["Request", "expectation"]
