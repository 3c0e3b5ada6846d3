"""Bytes in shared memory of one machine: pulled out of mappings that are kept, or read in place."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from raycrew.tensor_transport._bytes import (
    ArenaMaps,
    ArenaReader,
    ArenaSession,
    Run,
    Spot,
    in_time,
    is_arena,
    named_errors,
)
from raycrew.tensor_transport.errors import ShardError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports._interface import Buffer, Capabilities, Guard, Offer
from raycrew.tensor_transport.transports._pulling import (
    Job,
    Puller,
    check_here,
    gone,
    is_alive,
    lost,
    source_bytes,
)

_FILES = named_errors("shared memory")


class _Key(NamedTuple):
    """An arena's session and folder, and where in it the bytes lie."""

    folder: str
    spot: Spot


class SharedMemoryTransport(Puller):
    """Offers are copied into arenas of shared memory, which are reused once nobody reads what is withdrawn.

    Readers need not be in the owner's session; those that are keep its bytes alive when the owner dies.

    Args:
        session: Name of a session to join; one of its own unless given.
        arena_bytes: Size of an arena; a larger offer has one of its own.
        max_bytes: Refuse to take more memory than this; None for no limit.
        directory: A file system in memory.

    Raises:
        TransportError: Others could put files into the directory.
    """

    name = "shared_memory"

    @_FILES
    def __init__(
        self,
        session: str | None = None,
        *,
        arena_bytes: int = 64 << 20,
        max_bytes: int | None = None,
        directory: str | Path = "/dev/shm",
    ) -> None:
        self._survives = session is not None
        self._arenas = ArenaSession(
            type(self).__name__,
            session,
            arena_bytes=arena_bytes,
            max_bytes=max_bytes,
            directory=Path(directory),
        )
        self._maps = ArenaMaps()
        super().__init__()

    @property
    def release_scope(self) -> str:
        """What is the same for all that may withdraw what this one offered: its folder on this machine."""
        return f"{self._arenas.machine} {self._arenas.folder}"

    @property
    def capabilities(self) -> Capabilities:
        """Everything within one machine, but for devices."""
        return Capabilities(
            reach="node", maps=True, one_sided=True, keeps_copy=True, survives_owner=self._survives
        )

    @_FILES
    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """See `PullTransport.offer`."""
        self._ready_to_offer()
        raw = source_bytes(data)
        (spot,) = self._arenas.put([raw])
        return self._offer(_Key(str(self._arenas.folder), spot), raw, folded)

    @_FILES
    def reserve(self, size_bytes: int) -> tuple[Offer, Bytes]:
        """See `ReservingTransport`."""
        self._ready_to_offer()
        spot, room = self._arenas.reserve(size_bytes)
        return self._offer(_Key(str(self._arenas.folder), spot), room, folded=False), room

    @_FILES
    def map(self, offer: Offer, *, timeout_s: float | None = None) -> Bytes:
        """See `PullTransport.map`. The owner does not reuse the arena while the array lives."""
        self._check_open()
        with self._opened(offer, in_time(_path(offer), timeout_s)) as arena:
            return arena.view(_run(arena, offer))

    @_FILES
    def withdraw(self, offers: Sequence[Offer]) -> None:
        """See `PullTransport.withdraw`; other processes may, too, if they use the same directory."""
        self._arenas.release([offer.key.spot for offer in offers])

    @_FILES
    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        by_arena: dict[tuple[str, str], list[Job]] = defaultdict(list)
        for job in jobs:
            by_arena[job.offer.key.folder, job.offer.key.spot.arena].append(job)
        for members in by_arena.values():
            with self._opened(members[0].offer, guard.check) as arena:
                arena.prepare(sum(job.target.nbytes for job in members))
                for job in members:
                    _fill(arena, job, guard)
                arena.confirm()

    def _opened(self, offer: Offer, heed: Callable[[], object]) -> ArenaReader:
        check_here(offer)
        if not is_arena(name := offer.key.spot.arena):
            raise gone(offer, f"{name!r} is no name of an arena")
        try:
            return ArenaReader(_path(offer), self._maps, heed)
        except FileNotFoundError:
            raise _missing(offer) from None

    def _release(self) -> None:
        self._maps.clear()
        self._arenas.close()

    def _forget(self) -> None:
        """The session makes itself anew."""


def _path(offer: Offer) -> Path:
    return Path(offer.key.folder, f"raycrew-{offer.key.spot.arena}")


def _missing(offer: Offer) -> ShardError:
    return (
        gone(offer, "its memory was given back")
        if is_alive(offer.owner)
        else lost(offer, "its owner is dead")
    )


def _run(arena: ArenaReader, offer: Offer) -> Run:
    spot: Spot = offer.key.spot
    run = Run(spot.generation, spot.offset, spot.slot, offer.size_bytes)
    if (why := arena.why_gone(run)) is not None:
        raise gone(offer, why)
    return run


def _fill(arena: ArenaReader, job: Job, guard: Guard) -> None:
    start = _run(arena, job.offer).offset
    job.fill(lambda part, offset: arena.read(part, start + offset), guard)
