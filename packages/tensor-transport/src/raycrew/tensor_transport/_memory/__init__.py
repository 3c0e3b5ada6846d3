"""Memory that processes share, in arenas of one user, and what a forked child may not share."""

from raycrew.tensor_transport._memory.arena_files import HEADER_BYTES, NO_STEP, SIZE, STEP, Arena, Header
from raycrew.tensor_transport._memory.forks import remake_in_child
from raycrew.tensor_transport._memory.machine import memory_left
from raycrew.tensor_transport._memory.mappings import Place, read_arena
from raycrew.tensor_transport._memory.own_files import (
    is_arena,
    is_free,
    machine_name,
    named_errors,
    own_folder,
)
from raycrew.tensor_transport._memory.reading import ArenaReader, Run
from raycrew.tensor_transport._memory.session import ArenaSession, Spot

__all__ = [
    "HEADER_BYTES",
    "NO_STEP",
    "SIZE",
    "STEP",
    "Arena",
    "ArenaReader",
    "ArenaSession",
    "Header",
    "Place",
    "Run",
    "Spot",
    "is_arena",
    "is_free",
    "machine_name",
    "memory_left",
    "named_errors",
    "own_folder",
    "read_arena",
    "remake_in_child",
]
