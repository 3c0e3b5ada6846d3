"""The warm pool: one host per node, shared by all callers; CPUs are claimed only while it works."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import Session
from raycrew.worker_groups import _ray
from raycrew.worker_groups._fan_out.processes import CONTROL, Code, FanOutHost, Kept
from raycrew.worker_groups._fan_out.warm_pool.asked import Asked, Keys
from raycrew.worker_groups._fan_out.warm_pool.claims import Claims
from raycrew.worker_groups._fan_out.warm_pool.shares import Shares, share_out
from raycrew.worker_groups._ray import PerProcess
from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError

logger = logging.getLogger(__name__)

# Ray keeps the CPUs of finished tasks for about a second, for more of the same kind.
LEASE_S = 2.0
MAX_HOST_THREADS = 1024
LARGE_BYTES = 100_000
"""From this size on, code is put into the object store once, rather than sent with every batch."""
CLOSE_TIMEOUT_S = 30.0


@dataclass(eq=False)
class Member:
    """One host of the pool."""

    node_id: str
    handle: Any
    ready: "ray.ObjectRef[str]"


@dataclass
class Pool:
    """Hosts on the nodes of one Ray connection. Every method may be called from any thread."""

    owner: str
    item_seconds: dict[str, float] = field(default_factory=dict)
    _members: dict[str, Member] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _active: int = 0
    _shares: Shares = field(default_factory=lambda: Shares({}, True))
    _claims: Claims = field(default_factory=Claims)
    _look_again_at: float | None = None
    _noted: bool = False
    _closed: bool = False
    _batches: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _stored: "Kept[ray.ObjectRef[bytes]]" = field(default_factory=Kept)
    asked: Asked = field(default_factory=Asked)

    @contextlib.contextmanager
    def session(self, limit: int | None) -> Iterator[Mapping[str, int]]:
        """Work with the pool: gives the number of processes by node id; calls at the same time share them.

        Raises:
            WorkerGroupClosedError: The pool was closed meanwhile, or its connection to Ray has ended.
        """
        try:
            with self._shared(limit) as slots:
                yield slots
        except WorkerGroupError:
            self.check_open()  # else it was not the connection that ended
            raise

    @contextlib.contextmanager
    def _shared(self, limit: int | None) -> Iterator[Mapping[str, int]]:
        with self._lock:
            if self._active == 0:
                self._begin(limit)
            self._active += 1
            slots = self._shares.slots
        try:
            yield slots
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._claims.release(self.is_reachable)

    def ahead(self, limit: int | None) -> list[tuple[Member, int]]:
        """The hosts that a call would use now, each with the number of its processes; nothing is claimed.

        Raises:
            WorkerGroupClosedError: The pool was closed meanwhile, or its connection to Ray has ended.
        """
        with self._lock:
            self.check_open()
            slots = share_out(_ray.node_cpus(), limit).slots
            return [(self.member(node_id), n) for node_id, n in slots.items()]

    @contextlib.contextmanager
    def with_ahead(self, keys: Keys) -> Iterator[None]:
        """Who is given up in here is so with what was asked for ahead: later calls would wait for it."""
        try:
            yield
        except BaseException:
            for ahead in self.asked.take(keys):
                self.give_up(ahead.call_id, ahead.members)
            raise

    def give_up(self, call_id: str, members: Iterable[Member]) -> None:
        """Have hosts start nothing more of a call, and kill what they run of it."""
        with contextlib.suppress(WorkerGroupClosedError), _ray.while_connected(self.check_open):
            for member in members:
                member.handle.cancel.remote(call_id)

    def look_again(self) -> None:
        """Claim CPUs that were not free at first, or say once that even after Ray's own delays none is."""
        with self._lock:
            if self._closed or self._look_again_at is None or time.monotonic() < self._look_again_at:
                return
            self._look_again_at = None
            cpus = _ray.node_cpus()
            if all(cpus.get(node, (0, 0))[0] >= n for node, n in self._shares.slots.items()):
                self._claims.take(self._shares.slots)
            elif not self._noted and all(free < 1 for free, _ in cpus.values()):
                self._noted = True
                logger.warning(
                    "no CPU is free for fan_out: its %d processes share those that others hold",
                    sum(self._shares.slots.values()),
                )

    def member(self, node_id: str) -> Member:
        """The host of a node, started if it isn't there.

        Raises:
            WorkerGroupClosedError: The pool was closed meanwhile.
        """
        with self._lock:
            self.check_open()
            if node_id not in self._members:
                options: dict[str, Any] = {
                    "num_cpus": 0,
                    "max_restarts": 0,
                    "max_concurrency": min(2 * self._total_slots(node_id) + 8, MAX_HOST_THREADS),
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
                }
                remote: Any = ray.remote
                actor_class = remote(concurrency_groups={CONTROL: 2})(FanOutHost)
                handle: Any = _ray.start_actor(actor_class, options)
                with _ray.while_connected(self.check_open):
                    self._members[node_id] = Member(node_id, handle, handle.ready.remote())
            return self._members[node_id]

    def drop(self, member: Member) -> None:
        """Give up a host that has failed."""
        with self._lock:
            if self._members.get(member.node_id) is member:
                del self._members[member.node_id]
        _ray.end_actors([member.handle])

    def ask(self, member: Member) -> "ray.ObjectRef[Any]":
        """Ask a host what it can answer at once, whatever it runs."""
        with _ray.while_connected(self.check_open):
            return member.handle.statistics.remote()  # type: ignore[no-any-return]

    def is_answered(self, question: "ray.ObjectRef[Any]") -> bool:
        """Whether a host has answered, or died: what it runs says so, too."""
        with _ray.while_connected(self.check_open) as session:
            return bool(session.wait([question], timeout=0.0)[0])

    def check_open(self) -> None:
        """Raise if the pool was closed, or its connection to Ray has ended.

        Raises:
            WorkerGroupClosedError: It was, or that has.
        """
        if self._closed:
            raise WorkerGroupClosedError("the fan-out pool was closed while items were still running")
        self._check_session()

    def _check_session(self) -> None:
        _ray.check_session(Session(self.owner), "the fan-out pool")

    def is_reachable(self) -> bool:
        """Whether this process is still connected to Ray as when the pool was made."""
        return self.owner == _ray.connection()

    def next_batch(self) -> int:
        """A number for a batch, which none of this pool's had before."""
        return next(self._batches)

    def argument(self, code: Code) -> Any:
        """The bytes of some code, or a reference to them if they are many; kept for the next calls."""
        if code.data is None or len(code.data) <= LARGE_BYTES:
            return code.data
        with self._lock:
            with _ray.while_connected(self.check_open):
                ref = self._stored.get(code.key) or ray.put(code.data)
            self._stored.use(code.key, ref)
            return ref

    def living_nodes(self) -> set[str]:
        """Nodes that may hold a host now."""
        return set(_ray.node_cpus())

    def close(self) -> None:
        """End all hosts and their processes, and wait until what items have started is gone too."""
        with self._lock:
            self._closed = True
            members, self._members = list(self._members.values()), {}
            if not self.is_reachable():
                return
            self._claims.release(self.is_reachable)
        if not members:
            return
        # Else they have ended with the connection.
        with (
            contextlib.suppress(WorkerGroupClosedError),
            _ray.while_connected(self._check_session) as session,
        ):
            closing = [member.handle.close.remote() for member in members]
            session.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
            _ray.end_actors([member.handle for member in members])

    def _total_slots(self, node_id: str) -> int:
        free_and_total = _ray.node_cpus().get(node_id, (0.0, 1.0))
        return max(int(free_and_total[1]), self._shares.slots.get(node_id, 1))

    def _begin(self, limit: int | None) -> None:
        cpus = self._claims.free_cpus()
        if not cpus:
            raise WorkerGroupError("Ray knows of no living node")
        self._shares = share_out(cpus, limit)
        if self._shares.claimed:
            self._look_again_at = None
            self._claims.take(self._shares.slots)
        elif self._look_again_at is None:
            self._look_again_at = time.monotonic() + LEASE_S


_shared: Pool | None = None
_shared_lock = PerProcess(threading.Lock)


def shared_pool() -> Pool:
    """The pool of this process and of its present connection to Ray.

    Raises:
        WorkerGroupError: Not connected to Ray.
    """
    global _shared
    owner = _ray.connection()
    if owner is None:
        raise WorkerGroupError("not connected to Ray: call raycrew.cluster_core.init_ray() before fan_out()")
    with _shared_lock.here:
        if _shared is None or _shared.owner != owner:
            _shared = Pool(owner)
        return _shared


def close_shared_pool() -> None:
    """Close the pool of this process, if there is one; the next call starts another."""
    global _shared
    with _shared_lock.here:
        pool, _shared = _shared, None
    if pool is not None:
        pool.close()
