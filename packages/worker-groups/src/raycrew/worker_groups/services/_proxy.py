"""`Proxy`: one endpoint for the replicas of a service."""

from collections.abc import Callable, Sequence
from typing import Any

from raycrew.worker_groups.balancing import WorkerLoad
from raycrew.worker_groups.services._endpoint import Endpoint
from raycrew.worker_groups.services._forwarding import Choosing, Forwarder, Key, Limits
from raycrew.worker_groups.services._in_thread import ServedInThread
from raycrew.worker_groups.services._options import made_token
from raycrew.worker_groups.services._service import Service

Targets = Service | Sequence[Endpoint] | Callable[[], Sequence[Endpoint]]


class Proxy(ServedInThread):
    """One endpoint for several servers, from a thread of this process; a context manager.

    Each request goes to one server. Where that can't be connected to, the request goes to another one. Where
    it is lost on the way, the request goes to another one if it may run twice (GET, HEAD, OPTIONS, PUT and
    DELETE, or any with a header `Idempotency-Key`), and else is answered with 502. What the proxy answers by
    itself (502, 503, 504, …) is JSON with the fields "error" and "outcome", which is "surely not run" or
    "perhaps run"; a header `X-Raycrew-Outcome` says the same. An answer that has begun and breaks off is not
    ended, so that its client sees that. Bodies and answers, such as streams of events, are passed on as they
    come; web sockets are refused. A redirect to a server's own address becomes one to a path of the proxy.

    Args:
        targets: A `Service`, whose replicas are followed through restarts; endpoints; or a function that
            gives those of the moment, quickly. Once it raises a `ServiceClosedError`, as a service that was
            shut down does, requests are answered with 503 at once.
        strategy: Who gets a request: "least_outstanding", "round_robin", "consistent_hash", or a function as
            that of a `LoadBalancer`.
        key: Where the key of a request is, by which "consistent_hash" chooses: "header:x-session",
            "cookie:sid" or "json:user.id". Requests without one go by "least_outstanding". Servers are told
            apart by their ranks, or where several have the same, by their addresses.
        token: What clients have to know, as `Authorization: Bearer …`: "auto" makes one up, None has none.
            The servers' own tokens are added on the way.
        host: Address to listen on; by default loopback while the Ray cluster is one node, else the address of
            this one. "0.0.0.0" is all addresses.
        port: Port to listen on; by default one that is leased.
        timeout_s: Deadline of a request with its answer; None for no limit.
        patience_s: How long a request waits while no server takes it.
        resends: How often a request that may have run is sent again, if it may be.
        max_body_bytes: How long a request's body may be.
        held_bytes: How much of a body is held: a request that is longer is not sent again, and has no key in
            its JSON; an answer of known length that is no longer is held until all of it is there.
        max_connections: Connections at once; more are answered with 503.
        header_timeout_s: How long the head of a request may take.
        idle_timeout_s: How long a request may pause, and an answer that is not taken.

    Raises:
        ImportError: The extra `services` is not installed.
        ValueError: Options contradict one another.
        TypeError: An option is of a wrong kind.
        ServiceError: The address can't be had.

    Examples:
        >>> command = [sys.executable, "-m", "http.server", "{port}", "--bind", "{host}"]
        >>> with Service(cluster, command, ready="/", token=None, replicas=2) as service:
        ...     with Proxy(service, token=None) as proxy:
        ...         urllib.request.urlopen(proxy.endpoint.url).status
        200
    """

    def __init__(
        self,
        targets: Targets,
        *,
        strategy: str | Callable[[Sequence[WorkerLoad], Any], int] = "least_outstanding",
        key: str | None = None,
        token: str | None = "auto",
        host: str | None = None,
        port: int | None = None,
        timeout_s: float | None = 600.0,
        patience_s: float = 60.0,
        resends: int = 2,
        max_body_bytes: int = 64 << 20,
        held_bytes: int = 1 << 20,
        max_connections: int = 1024,
        header_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
    ) -> None:
        own = made_token(token)
        choosing = Choosing(endpoints_of(targets), strategy)
        where = None if key is None else Key.parsed(key)
        if (where is None) and choosing.needs_key:
            raise ValueError(f"{strategy!r} goes by a key: say where it is, as key='header:x-session'")
        limits = Limits(
            timeout_s=timeout_s,
            patience_s=patience_s,
            resends=resends,
            body_bytes=max_body_bytes,
            held_bytes=held_bytes,
        )
        app = Forwarder(choosing, limits, where, own is not None)
        super().__init__(app, own, host, port, max_connections, header_timeout_s, idle_timeout_s)


def endpoints_of(targets: Targets) -> Callable[[], Sequence[Endpoint]]:
    """What tells where servers are at the moment.

    Raises:
        TypeError: They are none.
        ValueError: There are none.
    """
    if isinstance(targets, Service):
        return lambda: targets.endpoints
    if callable(targets):
        return targets
    if not isinstance(targets, Sequence) or not all(isinstance(one, Endpoint) for one in targets):
        raise TypeError(f"targets are a Service, Endpoints or a function that gives some, not {targets!r}")
    if not targets:
        raise ValueError("there are no endpoints to pass requests on to")
    return lambda: targets
