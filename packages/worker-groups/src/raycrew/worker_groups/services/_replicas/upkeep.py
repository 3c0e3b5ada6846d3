"""The upkeep of a server: ready within a deadline, watched, and started anew within a budget."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from raycrew.cluster_core import ClusterError, PortLease, lease_ports
from raycrew.worker_groups._group import RestartBudget
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.services._endpoint import ReplicaState, Status
from raycrew.worker_groups.services._replicas.launching import ReplicaSpec, Site, endpoint_of, launch, site_of
from raycrew.worker_groups.services._replicas.probing import Answer, answer_of, is_taken
from raycrew.worker_groups.services._replicas.process import ServerProcess
from raycrew.worker_groups.services.errors import ServiceStartError, ServiceStartTimeoutError

logger = logging.getLogger(__name__)

_PROBE_S = 5.0  # for one answer
_FIRST_LOOKS_S, _LOOKS_S = 0.02, 0.5
_PORT_TRIES = 3


class Upkeep:
    """Keeps the server of one replica up, from `begin` to `stop`.

    Args:
        spec: What all replicas are told.
        node_address: Address of this node.
        rank: Number of the replica.
        run: Starts a server at a site.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        node_address: str,
        rank: int,
        run: Callable[[ReplicaSpec, Site], ServerProcess] = launch,
    ) -> None:
        self._spec, self._options = spec, spec.options
        self._node_address, self._rank, self._run = node_address, rank, run
        self._budget = RestartBudget(self._options.max_restarts)
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._lease: PortLease | None = None
        self._server: ServerProcess | None = None
        self._site: Site | None = None
        self._state = ReplicaState(rank, "restarting", reason="it is being started")
        self._thread = threading.Thread(target=self._keep, name="raycrew-service-upkeep", daemon=True)

    @property
    def state(self) -> ReplicaState:
        """How the replica is."""
        return self._state

    def begin(self) -> None:
        """Start the server; it is ready when this returns.

        Raises:
            ServiceStartError: It is not; nothing of it is left.
        """
        try:
            self._start()
        except BaseException:
            self.stop(0.0)
            raise
        self._thread.start()

    def stop(self, grace_s: float) -> bool:
        """End the server with all that it has started; whether nothing is left. Idempotent."""
        self._stopping.set()
        with self._lock:
            server, self._server = self._server, None
        is_gone = server is None or server.end(grace_s)
        if self._thread.is_alive():
            self._thread.join()
        if self._lease is not None:
            self._lease.release()
        self._tell("stopped")
        return is_gone

    def _start(self) -> None:
        """Start a server, on ports that nobody else serves on.

        Raises:
            ServiceStartError: It did not become ready.
        """
        deadline = time.monotonic() + self._options.ready_timeout_s
        for last in (False,) * (_PORT_TRIES - 1) + (True,):
            site = site_of(self._spec, self._node_address, self._ports(), self._rank)
            try:
                self._await_ready(site, deadline)
            except ServiceStartError as error:
                stolen = [port for port in site.ports if is_taken(site.asked_at, port)]
                if last or self._stopping.is_set() or not stolen:
                    raise
                logger.warning("somebody else serves on port %d: %s", stolen[0], error)
                self._let_ports_go()
            else:
                return

    def _await_ready(self, site: Site, deadline: float) -> None:
        with self._lock:
            if self._stopping.is_set():
                raise ServiceStartError("the service was shut down meanwhile")
            server = self._server = self._run(self._spec, site)
            self._site = site
        try:
            self._until_ready(server, site, deadline)
        except BaseException:
            self._end(server, 0.0)
            raise
        self._tell("ready", endpoint=endpoint_of(self._spec, site), pid=server.pid, reason="")

    def _until_ready(self, server: ServerProcess, site: Site, deadline: float) -> None:
        pause_s = _FIRST_LOOKS_S
        while True:
            time_s = min(_PROBE_S, max(deadline - time.monotonic(), _FIRST_LOOKS_S))
            listens = server.listens_on(site.ports[0])  # first: nobody else is to be told the token
            if listens and self._answer(site, time_s) == "good" and server.exit_code is None:
                return
            if server.await_exit(pause_s):
                raise self._ended_early(server)
            if time.monotonic() >= deadline:
                raise self._late(server, site, listens)
            pause_s = min(2 * pause_s, _LOOKS_S)

    def _ended_early(self, server: ServerProcess) -> ServiceStartError:
        code = server.exit_code
        self._end(server, 0.0)
        hint = "; a server stays in the foreground, and ends when it is told to" if code == 0 else ""
        return ServiceStartError(
            f"the server of replica {self._rank} ended with exit code {code} before it was ready{hint}",
            rank=self._rank,
            exit_code=code,
            log_tail=server.tail,
        )

    def _late(self, server: ServerProcess, site: Site, listens: bool) -> ServiceStartError:
        self._end(server, 0.0)
        what = f"gave no good answer at {self._options.ready}" if listens else "did not listen"
        if is_taken(site.asked_at, site.ports[0]):
            what += ", and another process does"
        return ServiceStartTimeoutError(
            f"the server of replica {self._rank} at {site.host} port {site.ports[0]} {what} within "
            f"{self._options.ready_timeout_s:g} s",
            rank=self._rank,
            log_tail=server.tail,
        )

    def _answer(self, site: Site, timeout_s: float) -> Answer:
        headers = endpoint_of(self._spec, site).headers
        return answer_of(site.asked_at, site.ports[0], self._options.ready, headers, timeout_s)

    def _keep(self) -> None:
        try:
            while (why := self._watched()) and self._revived(why):
                pass
        except Exception as error:
            logger.exception("replica %d is not looked after any more", self._rank)
            self._tell("failed", reason=f"it is not looked after any more: {error}")

    def _watched(self) -> str:
        """Wait until the server is to be replaced; gives why, or nothing once it is to end."""
        server, site = self._server, self._site
        if server is None or site is None:
            return ""
        good_at = time.monotonic()
        while not server.await_exit(self._options.probe_interval_s):
            if self._stopping.is_set():
                return ""
            if self._is_well(server, site):
                good_at = time.monotonic()
            elif time.monotonic() - good_at >= self._options.silent_s:
                return f"its server gave no good answer for {self._options.silent_s:g} s"
        return "" if self._stopping.is_set() else f"its server ended with exit code {server.exit_code}"

    def _is_well(self, server: ServerProcess, site: Site) -> bool:
        """Whether it serves, and has not left its port to somebody else; one that is full does."""
        time_s = min(_PROBE_S, self._options.silent_s)
        return server.listens_on(site.ports[0]) and self._answer(site, time_s) != "bad"

    def _revived(self, why: str) -> bool:
        """Whether the server runs again, after as many tries as the budget has."""
        self._note_end(why)
        while not self._stopping.is_set():
            try:
                pause_s = self._budget.take()
            except WorkerGroupError as none_left:
                self._tell("failed", reason=f"{self._state.reason}; {none_left}")
                return False
            if self._stopping.wait(pause_s):
                return False
            try:
                self._start()
            except ServiceStartError as error:
                known = {"exit_code": error.exit_code, "log_tail": error.log_tail}
                self._tell("restarting", reason=str(error.args[0]), **known)
            except ClusterError as error:
                self._tell("restarting", reason=str(error))
            else:
                self._state = replace(self._state, restarts=self._state.restarts + 1, reason=why)
                return True
            finally:
                self._budget.ended()
        return False

    def _note_end(self, why: str) -> None:
        """End what is left of the server, and tell."""
        with self._lock:
            server, self._server = self._server, None
        logger.warning("replica %d: %s", self._rank, why)
        if server is not None:
            code = server.exit_code
            server.end(0.0)
            self._tell("restarting", reason=why, exit_code=code, log_tail=server.tail)

    def _end(self, server: ServerProcess, grace_s: float) -> None:
        server.end(grace_s)
        with self._lock:
            if self._server is server:
                self._server = None

    def _tell(self, status: Status, **known: object) -> None:
        kept = {"exit_code": self._state.exit_code, "log_tail": self._state.log_tail}
        state = ReplicaState(self._rank, status, restarts=self._state.restarts, reason=self._state.reason)
        self._state = replace(state, **{**kept, **known})  # type: ignore[arg-type]

    def _ports(self) -> tuple[int, ...]:
        if self._lease is None:
            self._lease = lease_ports(self._options.ports, port_range=self._spec.port_range)
        return self._lease.ports

    def _let_ports_go(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._lease = None
