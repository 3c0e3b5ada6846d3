"""`ShardRegistry`: the backends that a process can use, and the fetching of handles through them."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from raycrew.tensor_transport._bytes import count_write
from raycrew.tensor_transport._handles.assembly import assemble, check_targets, plan_reads
from raycrew.tensor_transport._handles.cache import CacheStats, FetchCache, Flight, Look
from raycrew.tensor_transport._rows import ShardRead, StoreStats, TensorShardInfo
from raycrew.tensor_transport.errors import ShardError, ShardLostError, TransportError, TransportTimeoutError
from raycrew.tensor_transport.protocols import ShardBackend
from raycrew.tensor_transport.rtensor import RTensor

_NOTHING = Look()


class ShardRegistry:
    """Which backend reads which shard: the scheme that a shard names is looked up here, nowhere else.

    A registry can be pickled if its backends can; the fetch cache starts empty in the other process.

    Args:
        backends: One for each scheme; the first one stores what is put.
        inline: Backend for tensors below `inline_bytes`.
        inline_bytes: Tensors smaller than this travel inside their handles.
        cache_bytes: Size of the cache of whole shards fetched from backends that read over a network. A shard
            that several threads want is fetched once.
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
        kinds = [type(b) for b in every if getattr(b, "travels_with_handles", False)]
        self._for_others = TravellingReader(*kinds) if kinds else None

    @property
    def backends(self) -> Mapping[str, ShardBackend]:
        """The backends by scheme."""
        return dict(self._backends)

    @property
    def cache_stats(self) -> CacheStats:
        """Hits, misses and size of the fetch cache."""
        return self._cache.stats

    def __contains__(self, handle: object) -> bool:
        """Whether there is a backend for every shard of a handle: `fetch` knows how to read it."""
        return isinstance(handle, RTensor) and all(s.scheme in self._backends for s in handle.shards)

    def is_cached(self, handle: RTensor) -> bool:
        """Whether all shards of a handle are in the fetch cache: reading it asks nobody."""
        return all(shard.shard_id in self._cache for shard in handle.shards)

    def drop_cached(self, handles: RTensor | Iterable[RTensor | TensorShardInfo]) -> None:
        """Drop what the fetch cache holds of some handles or shards; they stay stored.

        `collect_shards(value)` has the shards of all handles within an object.
        """
        items = [handles] if isinstance(handles, RTensor) else list(handles)
        if wrong := [item for item in items if not isinstance(item, RTensor | TensorShardInfo)]:
            name = type(wrong[0]).__name__
            raise TypeError(f"handles or shards are dropped, not a {name}; see collect_shards(value)")
        for item in items:
            for shard in item.shards if isinstance(item, RTensor) else [item]:
                self._cache.forget(shard.shard_id)

    def for_others(self) -> "TravellingReader | None":
        """What goes along with a pickled handle: the classes of backends that need to know nothing."""
        return self._for_others

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

    def put(
        self, tensors: Sequence[torch.Tensor], *, step: int | None = None, replicas: Sequence[str] = ()
    ) -> list[RTensor]:
        """Store tensors (one call of each backend concerned) and give their handles.

        Args:
            tensors: What to store.
            step: The lease, which `expire` ends.
            replicas: Schemes of backends that keep a copy each, read where the first place is lost.

        Raises:
            TransportError: There is no room, or no store to be reached; nothing is stored then.
            ValueError: There is no backend for one of `replicas`.
        """
        if unknown := set(replicas) - self._backends.keys():
            raise ValueError(f"no backends for {sorted(unknown)}; there are: {', '.join(self._backends)}")
        groups: dict[str, list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            small = self._inline is not None and tensor.nbytes < self._inline_bytes
            groups[self._inline.scheme if small and self._inline else self._default.scheme].append(i)
        found: dict[int, TensorShardInfo] = {}
        try:
            for scheme, members in groups.items():
                parts = [tensors[i] for i in members]
                found.update(zip(members, self._backends[scheme].put(parts, step=step), strict=True))
                for other in () if scheme == "inline" else dict.fromkeys(replicas):
                    if other != scheme:
                        copies = self._backends[other].put(parts, step=step)
                        found.update(
                            {i: _with_replica(found[i], c) for i, c in zip(members, copies, strict=True)}
                        )
        except BaseException:
            self.release(list(found.values()))
            raise
        return [RTensor(found[i]).with_registry(self) for i in range(len(tensors))]

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
            into: A tensor for each handle, or None, to be filled (to torch, a write like others), on any
                device; warm memory is many times as fast as fresh one.
            timeout_s: Deadline of each backend's requests.
            borrow: Give unbroken parts of one shard in place where the backend can, for reading only: a write
                may show in other readers, or end the process.

        Returns:
            Tensors that may be written to, which nobody else sees, unless `borrow` is set.

        Raises:
            StaleHandleError: A shard was released, or its owner restarted.
            ShardLostError: An owner died, and no replica could be read either.
            TransportTimeoutError: A deadline passed.
            ValueError: A tensor in `into` has another shape or dtype than its handle, or can't be filled.
        """
        targets = list(into) if into is not None else [None] * len(handles)
        check_targets(handles, targets)
        direct = not self._cache.max_bytes
        plans = [plan_reads(handle, target, direct) for handle, target in zip(handles, targets, strict=True)]
        try:
            parts = iter(self._read_all([read for plan in plans for _, read in plan.parts], timeout_s))
            return [
                assemble(p, [(rows, read, *next(parts)) for rows, read in p.parts], borrow) for p in plans
            ]
        finally:
            count_write(target for target in targets if target is not None)

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
        asked: list[int] = []
        begun: dict[int, Flight] = {}
        awaited: dict[int, Flight] = {}
        try:
            for i, read in enumerate(reads):
                look = self._look(read)
                if look.tensor is not None:
                    found[i] = (read.of(look.tensor), False)
                elif look.awaited is not None:
                    awaited[i] = look.awaited
                else:
                    asked.append(i)
                    if look.begun is not None:
                        begun[i] = look.begun
            found.update(self._ask_all(asked, begun, reads, timeout_s))
        finally:
            for flight in begun.values():
                self._cache.land(flight)
        failed = []
        for i, flight in awaited.items():
            if not flight.wait(timeout_s):
                message = f"shard {flight.shard_id}, which another thread fetches, did not arrive"
                raise TransportTimeoutError(f"{message} within {timeout_s} s")
            if flight.tensor is None:
                failed.append(i)
            else:
                found[i] = (flight.tensor, False)
        found.update(self._ask_all(failed, {}, reads, timeout_s))
        return (found[i] for i in range(len(reads)))

    def _look(self, read: ShardRead) -> Look:
        if not self._cache.max_bytes or not getattr(self.backend_of(read.shard), "reads_over_network", False):
            return _NOTHING
        return self._cache.look(read.shard.shard_id, read.shard.size_bytes, fetch=read.is_whole)

    def _ask_all(
        self,
        asked: Sequence[int],
        begun: Mapping[int, Flight],
        reads: Sequence[ShardRead],
        timeout_s: float | None,
    ) -> Iterator[tuple[int, tuple[torch.Tensor, bool]]]:
        """Ask all backends at once; what threads wait for is theirs, too."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i in asked:
            groups[self.backend_of(reads[i].shard).scheme].append(i)
        for members, tensors in self._answers(groups, reads, timeout_s):
            own = self._backends[reads[members[0]].shard.scheme].gives_own_memory
            for i, tensor in zip(members, tensors, strict=True):
                if i in begun:
                    self._cache.land(begun[i], tensor)
                yield i, (tensor, own and i not in begun)

    def _answers(
        self, groups: Mapping[str, list[int]], reads: Sequence[ShardRead], timeout_s: float | None
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
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
        if not shard.replicas:
            raise failures[0]
        message = f"{shard.name} is lost, and so are its {len(shard.replicas)} replicas"
        raise ShardLostError(message, **shard.identity) from failures[0]


class TravellingReader:
    """Stands for a registry wherever a handle arrives: it has backends of the same classes.

    A process has one registry for the same classes, made when it is first needed.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = kinds

    def __contains__(self, handle: object) -> bool:
        schemes = {kind.scheme for kind in self._kinds}
        return isinstance(handle, RTensor) and all(shard.scheme in schemes for shard in handle.shards)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TravellingReader) and self._kinds == other._kinds

    def __hash__(self) -> int:
        return hash(self._kinds)

    def fetch(
        self, handles: Sequence[RTensor], *, timeout_s: float | None = 600.0, borrow: bool = False
    ) -> list[torch.Tensor]:
        """The tensors that handles name."""
        return _of_kinds(self._kinds).fetch(handles, timeout_s=timeout_s, borrow=borrow)

    def for_others(self) -> "TravellingReader":
        """Itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return TravellingReader, self._kinds


@functools.cache
def _of_kinds(kinds: tuple[type[Any], ...]) -> ShardRegistry:
    return ShardRegistry(*(kind() for kind in kinds))


def _rebuild(
    backends: Sequence[ShardBackend], inline: ShardBackend | None, inline_bytes: int, cache_bytes: int
) -> ShardRegistry:
    return ShardRegistry(*backends, inline=inline, inline_bytes=inline_bytes, cache_bytes=cache_bytes)


def _with_replica(shard: TensorShardInfo, place: TensorShardInfo) -> TensorShardInfo:
    return dataclasses.replace(shard, replicas=(*shard.replicas, place))
