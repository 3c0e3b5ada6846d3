"""Memory that processes share, in arenas of one user, and what a forked child may not share."""

from raycrew.tensor_transport._bytes.shared.arena_files import (
    NO_STEP,
    SIZE,
    STEP,
    Arena,
)
from raycrew.tensor_transport._bytes.shared.belonging import Belonging
from raycrew.tensor_transport._bytes.shared.forks import remake_in_child
from raycrew.tensor_transport._bytes.shared.machine import memory_left
from raycrew.tensor_transport._bytes.shared.mappings import Place, read_arena
from raycrew.tensor_transport._bytes.shared.own_files import (
    in_time,
    is_arena,
    is_free,
    machine_name,
    named_errors,
)
from raycrew.tensor_transport._bytes.shared.reading import ArenaMaps, ArenaReader, Run
from raycrew.tensor_transport._bytes.shared.session import ArenaSession, Spot

__all__ = [
    "NO_STEP",
    "SIZE",
    "STEP",
    "Arena",
    "ArenaMaps",
    "ArenaReader",
    "ArenaSession",
    "Belonging",
    "Place",
    "Run",
    "Spot",
    "in_time",
    "is_arena",
    "is_free",
    "machine_name",
    "memory_left",
    "named_errors",
    "read_arena",
    "remake_in_child",
]
