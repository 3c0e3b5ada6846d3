"""`raycrew-env`: what is asked for, what each command finds, and how that is said to people and programs."""

from raycrew.venv_manager._command_line.parsing import main

__all__ = ["main"]
