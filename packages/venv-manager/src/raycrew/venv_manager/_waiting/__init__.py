"""Waiting for each other: file locks, progress, and Ctrl-C."""

from raycrew.venv_manager._waiting.interrupt import LOOK_S, await_all, end, end_all, result_of, start, workers
from raycrew.venv_manager._waiting.locks import KeyLocks, processes_using, scratch, slot
from raycrew.venv_manager._waiting.progress import Report, changes, reporting, silent

__all__ = [
    "LOOK_S",
    "KeyLocks",
    "Report",
    "await_all",
    "changes",
    "end",
    "end_all",
    "processes_using",
    "reporting",
    "result_of",
    "scratch",
    "silent",
    "slot",
    "start",
    "workers",
]
