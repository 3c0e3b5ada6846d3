"""`Service`: servers of HTTP as replicas on a cluster."""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from raycrew.cluster_core import Cluster
from raycrew.worker_groups._calls import deadline_after, left
from raycrew.worker_groups._group import RayWorkerGroup
from raycrew.worker_groups._start import EnvironmentOf, RayWorkerBuilder, bundles_of
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupClosedError
from raycrew.worker_groups.protocols import EnvironmentProvider
from raycrew.worker_groups.services._addresses import loopback_if_alone
from raycrew.worker_groups.services._endpoint import Endpoint, ReplicaState
from raycrew.worker_groups.services._following import Following
from raycrew.worker_groups.services._options import ServiceOptions, check_token, made_token
from raycrew.worker_groups.services._places import places_for
from raycrew.worker_groups.services._replicas import Replica, ReplicaSpec
from raycrew.worker_groups.services.errors import ServiceClosedError, ServiceError, ServiceTimeoutError

_PROCESS_S = 120.0  # for a worker's process, besides the time of its server
_END_S = 20.0
_LOOK_S = 0.1


class Service:
    """Servers of HTTP beside workers: one process each on a bundle of a cluster, kept up.

    When the constructor returns, each server has answered; on any failure none is left. A server whose
    process ends, or that gives no good answer for a while, is replaced: on the same port where nobody has
    taken it, else on another; one whose worker has died gets a new worker, and other ports. A context
    manager; the end of the block ends all servers with what they have started.

    It is a worker group whose workers are the servers' parents, so that what holds for groups holds here.

    Args:
        cluster: Where to place replicas.
        server: An ASGI application, "package.app:application", or a function that makes one without
            arguments, "package.app:create", which uvicorn serves; or a command that serves, as a sequence of
            words, in which {port} ({port1}, … of `ports`), {host} (to bind to), {address} (known to others)
            and {rank} are filled in. It stays in the foreground.
        ports: How many ports each server gets. Its environment has all as RAYCREW_SERVICE_PORTS, and the
            address to bind to as RAYCREW_SERVICE_HOST.
        replicas: How many servers there are.
        ready: Path that a server answers with 2xx once it is ready, and for as long as it is well; None where
            it is enough that its port accepts.
        ready_is_open: Whether an application's path `ready` may be read without the token.
        name: Name of the group; by default that of what is served.
        token: What clients have to know, as `Authorization: Bearer …`: "auto" makes one up, None has none.
            An application is kept behind it; a command has to check it itself.
        token_variable: Variable of the servers' environment that has the token, for a command that reads it.
        host: Address that servers bind to; by default loopback while the Ray cluster is one node, else the
            address of their node. "0.0.0.0" is all addresses.
        cwd: Working directory of the servers on their nodes, where an application's modules are found, too.
        env_vars: Variables of the servers; see `RayWorkerGroup`.
        secrets: Names of variables of this process that servers get too, and that show up nowhere.
        environments: Which Python an application runs in; see `RayWorkerGroup`.
        environment: Under which name `environments` know it; by default "package.app.create". A command has
            no such name by itself.
        max_restarts: How often each server is started anew, and the group's workers together; with pauses as
            those of groups.
        ready_timeout_s: How long a server may take to become ready.
        probe_interval_s: Seconds between two questions at `ready`.
        silent_s: A server that gives no good answer at `ready` for so long is replaced; one that is at its
            `max_connections` has given one.
        grace_s: How long a server may take to end after SIGTERM.
        max_connections: Connections at once of an application's server; more are answered with 503.
        port_range: First and last port to lease from.

    Raises:
        ServiceStartError: A server did not become ready: with its exit code and the end of its output. One
            that was late raises a `ServiceStartTimeoutError`.
        ImportError: An application is to be served, and the extra `services` is not installed.
        ValueError: Options contradict one another, or there are too few bundles.
        TypeError: An option is of a wrong kind.
        BundlesOccupiedError: Other groups hold the bundles.
        WorkerFailureError: A worker's process could not be started.

    Examples:
        >>> command = [sys.executable, "-m", "http.server", "{port}", "--bind", "{host}"]
        >>> with Service(cluster, command, ready="/", token=None) as service:
        ...     urllib.request.urlopen(service.endpoints[0].url).status
        200
    """

    def __init__(
        self,
        cluster: Cluster,
        server: str | Sequence[str],
        *,
        ports: int = 1,
        replicas: int = 1,
        ready: str | None = "/health",
        ready_is_open: bool = False,
        name: str = "",
        token: str | None = "auto",
        token_variable: str | None = None,
        host: str | None = None,
        cwd: str | PathLike[str] | None = None,
        env_vars: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        environments: EnvironmentProvider | Literal["auto"] | None = None,
        environment: str = "",
        max_restarts: int = 3,
        ready_timeout_s: float = 600.0,
        probe_interval_s: float = 1.0,
        silent_s: float = 30.0,
        grace_s: float = 10.0,
        max_connections: int = 1024,
        port_range: tuple[int, int] | None = None,
    ) -> None:
        cwd = None if cwd is None else Path(cwd).absolute()  # here, for workers have a folder of their own
        options = ServiceOptions.among(locals())
        own = made_token(token)
        check_token(own, options)
        if options.is_app and environments is None:
            check_installed()
        self._options, self._closed = options, False
        self._following = Following(replicas)
        spec = ReplicaSpec(options, host or loopback_if_alone(), own, port_range)
        self._group = _start(
            cluster,
            RayWorkerBuilder(Replica, spec),
            name_prefix=name or options.shown,
            bundle_indices_list=_free_places(cluster, replicas),
            env_vars=env_vars,
            secrets=secrets,
            environments=_environment_of(options, environments),
            restart_on_failure=True,
            max_restarts=max_restarts,
            min_workers=1,
            on_worker_failure=self._following.note_loss,
            init_timeout_s=ready_timeout_s + _PROCESS_S,
            ports_per_worker=0,
            port_range=port_range,
            progress=False,
        )
        try:
            self._following.begin(self._group, probe_interval_s)
        except BaseException:
            self._group.shutdown(force=True)
            raise

    @property
    def name(self) -> str:
        """Name of its group."""
        return self._group.name

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the replicas that are ready answer, as of a moment ago; workers may be given these.

        A replica that was replaced may have another endpoint, at which this looks about once a second. What
        has to follow that from elsewhere asks a `Proxy`.

        Raises:
            ServiceClosedError: The service was shut down.
        """
        return tuple(state.endpoint for state in self.replicas if state.endpoint is not None)

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """How each replica is, as of a moment ago.

        Raises:
            ServiceClosedError: The service was shut down.
        """
        self._check_open()
        return self._following.states

    def refresh(self) -> Sequence[ReplicaState]:
        """Ask all replicas now how they are; one that does not answer within 5 s is as it was.

        Raises:
            ServiceClosedError: The service was shut down.
        """
        self._check_open()
        try:
            self._following.look(self._group)
        except WorkerGroupClosedError as error:
            raise ServiceClosedError(f"service {self.name!r}: {error}") from error
        return self.replicas

    def await_ready(self, timeout_s: float = 600.0) -> tuple[Endpoint, ...]:
        """Wait until all replicas are ready; gives their endpoints.

        Raises:
            ServiceTimeoutError: Some were not in time.
            ServiceError: The server of one, or its worker, has failed for good.
            ServiceClosedError: The service was shut down.
            TypeError: `timeout_s` is no number.
            ValueError: It is `nan`.
        """
        deadline = deadline_after(timeout_s)
        while waiting := [state for state in self.refresh() if state.status != "ready"]:
            if failed := [state for state in waiting if state.status == "failed"]:
                raise _failed(self.name, failed[0])
            if left(deadline) == 0.0:
                said = ", ".join(f"{state.rank} ({state.status}: {state.reason})" for state in waiting)
                raise ServiceTimeoutError(f"replicas of {self.name!r} not ready in {timeout_s:g} s: {said}")
            time.sleep(_LOOK_S)
        return self.endpoints

    def logs(self, rank: int = 0) -> str:
        """The end of the output of a replica and its servers."""
        self._check_open()
        return self._group.logs(rank)

    def shutdown(self, timeout: float | None = None, force: bool = False) -> bool:
        """End all servers, with all that they have started, and give the bundles back; idempotent.

        Args:
            timeout: Seconds for servers and workers to end by themselves; then they are killed. By default
                `grace_s` and a little more.
            force: Kill them at once.

        Returns:
            Whether each ended by itself (or was to be killed, with `force`), and nothing is left.

        Raises:
            TypeError: `timeout` is no number; nothing is done.
            ValueError: The same of `nan`.
        """
        timeout_s = self._options.grace_s + _END_S if timeout is None else timeout
        deadline_after(timeout_s)  # what is no time is refused before anything is done
        self._closed = True
        self._following.end()
        return self._group.shutdown(None if force else "stop", timeout_s, force)

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceClosedError(f"service {self.name!r} was shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        if self._closed:
            return f"Service({self.name!r}, shut down)"
        ready = sum(state.status == "ready" for state in self._following.states)
        return f"Service({self.name!r}, {ready} of {self._options.replicas} ready)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"service {self.name!r} stays where it was made; pass its endpoints on")


def check_installed() -> None:
    """Check that an application can be served.

    Raises:
        ImportError: The extra is not installed.
    """
    importlib.import_module("raycrew.worker_groups.services._asgi")


def _free_places(cluster: Cluster, replicas: int) -> list[list[int]]:
    bundles = bundles_of(cluster)
    holders: Callable[[], Mapping[int, Sequence[Any]]] = getattr(cluster, "holders", dict)
    slots = getattr(cluster, "max_colocated_worker_groups", 1)
    return places_for(bundles, holders(), slots, replicas)


def _environment_of(
    options: ServiceOptions, environments: EnvironmentProvider | Literal["auto"] | None
) -> EnvironmentProvider | None:
    name = options.environment or (options.shown.replace(":", ".") if options.is_app else "")
    if environments is None:
        if options.environment:
            raise ValueError(f"environment={name!r} is one of environments=, of which there are none")
        return None
    if not name:
        raise ValueError("a command has no environment of its own: say which is meant, as environment=")
    return EnvironmentOf(environments, name)


def _start(cluster: Cluster, worker: RayWorkerBuilder, **options: Any) -> RayWorkerGroup:
    try:
        return RayWorkerGroup(cluster, worker, **options)
    except WorkerFailureError as error:
        cause = error.cause
        if not isinstance(cause, ServiceError):
            raise
        raise type(cause)(cause.args[0], **cause.details) from error


def _failed(name: str, state: ReplicaState) -> ServiceError:
    known = {"rank": state.rank, "exit_code": state.exit_code, "log_tail": state.log_tail}
    return ServiceError(f"replica {state.rank} of {name!r} has failed: {state.reason}", **known)
