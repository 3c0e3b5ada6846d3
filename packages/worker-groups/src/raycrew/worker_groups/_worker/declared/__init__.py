"""What a worker's method says of its own call: who gets which rows, and how results become one value."""

from raycrew.worker_groups._worker.declared.declaration import Declaration, declaration_of, find_declaration
from raycrew.worker_groups._worker.declared.decorators import per_rank, rank_zero, replicated, sharded
from raycrew.worker_groups._worker.declared.joining import Join
from raycrew.worker_groups._worker.declared.method_types import (
    AsyncMethod,
    AsyncOrDeclared,
    DeclaredMethod,
    SyncMethod,
)
from raycrew.worker_groups._worker.declared.rows import is_shardable
from raycrew.worker_groups._worker.declared.splitting import split_rows

__all__ = [
    "AsyncMethod",
    "AsyncOrDeclared",
    "Declaration",
    "DeclaredMethod",
    "Join",
    "SyncMethod",
    "declaration_of",
    "find_declaration",
    "is_shardable",
    "per_rank",
    "rank_zero",
    "replicated",
    "sharded",
    "split_rows",
]
