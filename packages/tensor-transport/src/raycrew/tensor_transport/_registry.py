"""`ShardRegistry`: the backends that a process can use, and the fetching of handles through them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from raycrew.tensor_transport._bytes import copy_bytes, fresh_tensor
from raycrew.tensor_transport._cache import CacheStats, FetchCache
from raycrew.tensor_transport._shards import ShardRead, StoreStats, TensorShardInfo, dtype_name
from raycrew.tensor_transport._views import ShardRows
from raycrew.tensor_transport.errors import ShardError, ShardLostError, TransportError
from raycrew.tensor_transport.protocols import ShardBackend
from raycrew.tensor_transport.rtensor import RTensor


class ShardRegistry:
    """Which backend reads which shard: the scheme that a shard names is looked up here, nowhere else.

    A registry can be pickled if its backends can; the fetch cache starts empty in the other process.

    Args:
        backends: One for each scheme; the first one stores what is put.
        inline: Backend for tensors below `inline_bytes`.
        inline_bytes: Tensors smaller than this travel inside their handles.
        cache_bytes: Size of the cache of whole shards fetched from backends that copy over a network.
    """

    def __init__(
        self,
        *backends: ShardBackend,
        inline: ShardBackend | None = None,
        inline_bytes: int = 0,
        cache_bytes: int = 0,
    ) -> None:
        every = [*backends, inline] if inline is not None else list(backends)
        self._backends = {backend.scheme: backend for backend in every}
        if not backends or len(self._backends) < len(every):
            raise ValueError(f"one backend for each scheme, at least one; got {[b.scheme for b in every]}")
        if inline_bytes and inline is None:
            raise ValueError("inline_bytes needs an inline backend")
        self._default, self._inline, self._inline_bytes = backends[0], inline, inline_bytes
        self._cache = FetchCache(cache_bytes)

    @property
    def backends(self) -> Mapping[str, ShardBackend]:
        """The backends by scheme."""
        return dict(self._backends)

    @property
    def cache_stats(self) -> CacheStats:
        """Hits, misses and size of the fetch cache."""
        return self._cache.stats

    def backend_of(self, shard: TensorShardInfo) -> ShardBackend:
        """The backend of a shard's scheme.

        Raises:
            TransportError: There is none.
        """
        try:
            return self._backends[shard.scheme]
        except KeyError:
            known = ", ".join(sorted(self._backends))
            message = (
                f"no backend for the scheme {shard.scheme!r} of shard {shard.shard_id}; there are: {known}"
            )
            raise TransportError(message) from None

    def put(self, tensors: Sequence[torch.Tensor], *, step: int | None = None) -> list[RTensor]:
        """Store tensors (one call of each backend concerned) and give their handles."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            small = self._inline is not None and tensor.nbytes < self._inline_bytes
            groups[self._inline.scheme if small and self._inline else self._default.scheme].append(i)
        handles: dict[int, RTensor] = {}
        for scheme, members in groups.items():
            shards = self._backends[scheme].put([tensors[i] for i in members], step=step)
            handles.update({i: RTensor(shard) for i, shard in zip(members, shards, strict=True)})
        return [handles[i] for i in range(len(tensors))]

    def fetch(
        self,
        handles: Sequence[RTensor],
        *,
        into: Sequence[torch.Tensor | None] | None = None,
        timeout_s: float | None = 600.0,
        borrow: bool = False,
    ) -> list[torch.Tensor]:
        """The tensors that handles name: only the rows and columns needed, one request for each owner.

        Args:
            handles: What to fetch.
            into: A CPU tensor for each handle, or None, to be filled; warm memory is many times as fast.
            timeout_s: Deadline of each backend's requests.
            borrow: Give unbroken parts of one shard in place where the backend can, for reading only: a write
                may show in other readers, or end the process.

        Returns:
            Tensors that may be written to, which nobody else sees, unless `borrow` is set.

        Raises:
            StaleHandleError: A shard was released, or its owner restarted.
            ShardLostError: An owner died, and no replica could be read either.
            TransportTimeoutError: A deadline passed.
            ValueError: A tensor in `into` has another shape or dtype than its handle.
        """
        targets = list(into) if into is not None else [None] * len(handles)
        _check_targets(handles, targets)
        direct = not self._cache.max_bytes
        plans = [_plan(handle, target, direct) for handle, target in zip(handles, targets, strict=True)]
        parts = iter(self._read_all([read for plan in plans for _, read in plan.parts], timeout_s))
        return [
            _assemble(plan, [(rows, read, *next(parts)) for rows, read in plan.parts], borrow)
            for plan in plans
        ]

    def release(self, shards: Sequence[TensorShardInfo]) -> None:
        """Give shards up, replicas included."""
        groups: dict[str, list[TensorShardInfo]] = defaultdict(list)
        for shard in shards:
            self._cache.forget(shard.shard_id)
            for place in (shard, *shard.replicas):
                groups[place.scheme].append(place)
        for members in groups.values():
            self.backend_of(members[0]).release(members)

    def expire(self, before_step: int) -> int:
        """Release everything that was put with an earlier step; how many shards that were."""
        self._cache.clear()
        return sum(backend.expire(before_step) for backend in self._backends.values())

    def stats(self) -> dict[str, StoreStats]:
        """What each backend's store holds."""
        return {scheme: backend.stats() for scheme, backend in self._backends.items()}

    def close(self) -> None:
        """Close all backends; idempotent."""
        self._cache.clear()
        for backend in self._backends.values():
            backend.close()

    def __reduce__(self) -> tuple[Any, ...]:
        every = [b for b in self._backends.values() if b is not self._inline]
        return _rebuild, (every, self._inline, self._inline_bytes, self._cache.max_bytes)

    def _read_all(
        self, reads: Sequence[ShardRead], timeout_s: float | None
    ) -> Iterator[tuple[torch.Tensor, bool]]:
        """Each read's tensor, and whether it is the caller's own."""
        found: dict[int, tuple[torch.Tensor, bool]] = {}
        groups: dict[str, list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            cached = self._cache.get(read.shard.shard_id)
            if cached is not None:
                found[i] = (read.of(cached), False)
            else:
                groups[self.backend_of(read.shard).scheme].append(i)
        for members, tensors in self._ask_all(groups, reads, timeout_s):
            own = self._backends[reads[members[0]].shard.scheme].gives_own_memory
            for i, tensor in zip(members, tensors, strict=True):
                kept = own and reads[i].is_whole and self._cache.offer(reads[i].shard.shard_id, tensor)
                found[i] = (tensor, own and not kept)
        return (found[i] for i in range(len(reads)))

    def _ask_all(
        self, groups: Mapping[str, list[int]], reads: Sequence[ShardRead], timeout_s: float | None
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Ask all backends at once."""
        if len(groups) == 1:
            for scheme, members in groups.items():
                yield members, self._ask(scheme, [reads[i] for i in members], timeout_s)
            return
        with ThreadPoolExecutor(max(1, len(groups)), thread_name_prefix="shard-fetch") as pool:
            pending = [
                (members, pool.submit(self._ask, scheme, [reads[i] for i in members], timeout_s))
                for scheme, members in groups.items()
            ]
            for members, future in pending:
                yield members, future.result()

    def _ask(self, scheme: str, reads: Sequence[ShardRead], timeout_s: float | None) -> list[torch.Tensor]:
        try:
            return self._backends[scheme].fetch(reads, timeout_s=timeout_s)
        except ShardError:
            if not any(read.shard.replicas for read in reads):
                raise
        return [self._ask_replicas(read, timeout_s) for read in reads]

    def _ask_replicas(self, read: ShardRead, timeout_s: float | None) -> torch.Tensor:
        failures: list[ShardError] = []
        for place in (read.shard, *read.shard.replicas):
            try:
                wanted = ShardRead(place, read.rows, read.columns, read.into)
                tensor = self.backend_of(place).fetch([wanted], timeout_s=timeout_s)[0]
                return tensor if self.backend_of(place).gives_own_memory else tensor.clone()
            except ShardError as error:
                failures.append(error)
        shard = read.shard
        raise ShardLostError(
            f"shard {shard.shard_id} of {shard.owner} on node {shard.node_id or 'unknown'} is lost, "
            f"and so are its {len(shard.replicas)} replicas",
            **shard.identity,
        ) from failures[0]


def _rebuild(
    backends: Sequence[ShardBackend], inline: ShardBackend | None, inline_bytes: int, cache_bytes: int
) -> ShardRegistry:
    return ShardRegistry(*backends, inline=inline, inline_bytes=inline_bytes, cache_bytes=cache_bytes)


def _check_targets(handles: Sequence[RTensor], targets: Sequence[torch.Tensor | None]) -> None:
    if len(targets) != len(handles):
        raise ValueError(f"{len(targets)} tensors in `into` for {len(handles)} handles")
    for handle, target in zip(handles, targets, strict=True):
        if target is not None and (target.shape != handle.shape or target.dtype != handle.dtype):
            raise ValueError(f"`into` is {_kind(target)}, the handle {_kind(handle)}")


def _kind(tensor: torch.Tensor | RTensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to read of each shard of a handle, and the memory for it (None: what the backend gives)."""

    handle: RTensor
    out: torch.Tensor | None
    parts: list[tuple[ShardRows, ShardRead]]


def _plan(handle: RTensor, target: torch.Tensor | None, direct: bool) -> _Plan:
    """`direct`: let backends write into the result."""
    needed = handle.view.by_shard()
    out = target
    if out is None and len(needed) != 1:
        out = fresh_tensor(handle.shape, handle.dtype)
    parts = []
    for rows in needed:
        shard = handle.shards[rows.shard]
        whole = isinstance(rows.rows, slice) and rows.rows == slice(0, shard.rows)
        columns = _stored_columns(handle, shard)
        into = _region(handle, shard, rows, out) if direct and out is not None else None
        parts.append((rows, ShardRead(shard, None if whole else rows.rows, columns, into)))
    return _Plan(handle, out, parts)


def _region(
    handle: RTensor, shard: TensorShardInfo, rows: ShardRows, out: torch.Tensor
) -> torch.Tensor | None:
    """Where a part belongs, if that is one run of memory."""
    if rows.repeats is not None or not isinstance(rows.positions, slice):
        return None
    if handle.ndim > 1 and not _covers(handle, shard):
        return None
    region = out[rows.positions] if handle.ndim else out
    return region if region.is_contiguous() and region.device.type == "cpu" else None


def _covers(handle: RTensor, shard: TensorShardInfo) -> bool:
    """Whether a shard has all columns of a handle."""
    return shard.columns[0] <= handle.columns_range[0] and handle.columns_range[1] <= shard.columns[1]


def _stored_columns(handle: RTensor, shard: TensorShardInfo) -> tuple[int, int] | None:
    if handle.ndim < 2 or handle.columns_range == shard.columns:
        return None
    start, end = (
        max(handle.columns_range[0], shard.columns[0]),
        min(handle.columns_range[1], shard.columns[1]),
    )
    return (start - shard.column_offset, max(start, end) - shard.column_offset)


def _assemble(
    plan: _Plan, parts: Sequence[tuple[ShardRows, ShardRead, torch.Tensor, bool]], borrow: bool
) -> torch.Tensor:
    """Put the parts of one handle where they belong."""
    handle, out = plan.handle, plan.out
    if out is None:
        rows, _, tensor, own = parts[0]
        straight = rows.repeats is None and isinstance(rows.positions, slice)
        if (own or borrow) and straight and tensor.shape == handle.shape:
            return tensor
        out = fresh_tensor(handle.shape, handle.dtype)
    for rows, read, tensor, _ in parts:
        if tensor is not read.into:
            _place(handle, read.shard, rows, tensor, out)
    return out


def _place(
    handle: RTensor, shard: TensorShardInfo, rows: ShardRows, tensor: torch.Tensor, out: torch.Tensor
) -> None:
    if rows.repeats is not None:
        tensor = tensor[torch.from_numpy(rows.repeats)]
    if not handle.ndim:
        out.copy_(tensor)
        return
    where = rows.positions if isinstance(rows.positions, slice) else torch.from_numpy(rows.positions)
    if handle.ndim == 1 or tensor.shape[1] == out.shape[1]:
        _write(out, where, tensor)
        return
    first = max(0, shard.column_offset - handle.columns_range[0])
    last = first + tensor.shape[1]
    out[where, :first] = shard.pad_value or 0
    out[where, last:] = shard.pad_value or 0
    out[where, first:last] = tensor


def _write(out: torch.Tensor, where: slice | torch.Tensor, tensor: torch.Tensor) -> None:
    """Rows into `out`; unbroken memory is copied faster by numpy, and in threads, than by torch."""
    if not isinstance(where, slice):
        out[where] = tensor
        return
    part = out[where]
    if part.is_contiguous() and tensor.is_contiguous() and part.numel() and part.device.type == "cpu":
        copy_bytes(_raw(part), _raw(tensor))
    else:
        part.copy_(tensor)


def _raw(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
