"""Waiting for each other: file locks, progress, and Ctrl-C."""

from raycrew.venv_manager._waiting.forks import CachedProperty, PerProcess
from raycrew.venv_manager._waiting.interrupt import LOOK_S, await_all, end, end_all, result_of, start, workers
from raycrew.venv_manager._waiting.locks import KeyLocks, slot
from raycrew.venv_manager._waiting.processes import Users, processes_using
from raycrew.venv_manager._waiting.progress import Report, reporting, silent
from raycrew.venv_manager._waiting.temporary import scratch

__all__ = [
    "LOOK_S",
    "CachedProperty",
    "KeyLocks",
    "PerProcess",
    "Report",
    "Users",
    "await_all",
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
