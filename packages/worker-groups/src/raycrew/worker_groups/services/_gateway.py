"""`Gateway`: methods of a worker group over HTTP."""

from collections.abc import Sequence
from typing import Any

from raycrew.worker_groups.balancing import Balanced
from raycrew.worker_groups.services._forwarding import Caller, Key, Limits
from raycrew.worker_groups.services._in_thread import ServedInThread
from raycrew.worker_groups.services._options import made_token


class Gateway(ServedInThread):
    """One endpoint for the workers of a group, such as generators, from a thread of this process.

    `POST /generate` with a JSON object calls the method with these keyword arguments, on the worker that the
    group's balancer chooses, and is answered with its result as JSON. What has none is told as by a `Proxy`,
    with "error" and "outcome", which may also be "has run": 400 arguments that don't fit, 404 no such method,
    500 what the method raised, 502 a worker that was lost on the way, 503 no worker, 504 no result in time.
    A call whose request has a header `Idempotency-Key` is made again on another worker when its worker was
    lost. One whose client has gone away is cancelled. A context manager.

    Args:
        group: A worker group that was made with `enable_load_balancing=True`, or a handle of one.
        methods: The methods that may be called.
        key: Where the key of a request is, by which "consistent_hash" chooses: "header:x-session",
            "cookie:sid" or "json:user.id".
        token: What clients have to know, as `Authorization: Bearer …`: "auto" makes one up, None has none.
        host: Address to listen on; by default loopback while the Ray cluster is one node, else the address of
            this one.
        port: Port to listen on; by default one that is leased.
        timeout_s: Deadline of a call; None for no limit.
        resends: How often a call that may have run is made again, if it may be.
        max_body_bytes: How long a request's body may be.
        max_connections: Connections at once; more are answered with 503.
        header_timeout_s: How long the head of a request may take.
        idle_timeout_s: How long a request may pause, and an answer that is not taken.

    Raises:
        ValueError: The group has no balancer, or chooses by a key and none is named; or an option is out of
            range.
        TypeError: An option is of a wrong kind.
        ServiceError: The address can't be had.

    Examples:
        >>> class Generator:
        ...     def generate(self, prompt: str) -> str:
        ...         return prompt[::-1]
        >>> with RayWorkerGroup(cluster, Generator, enable_load_balancing=True) as group:
        ...     with Gateway(group, ["generate"], token=None) as gateway:
        ...         urllib.request.urlopen(f"{gateway.endpoint}/generate", b'{"prompt": "abc"}').read()
        b'"cba"'
    """

    def __init__(
        self,
        group: Balanced,
        methods: Sequence[str],
        *,
        key: str | None = None,
        token: str | None = "auto",
        host: str | None = None,
        port: int | None = None,
        timeout_s: float | None = 600.0,
        resends: int = 2,
        max_body_bytes: int = 64 << 20,
        max_connections: int = 1024,
        header_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
    ) -> None:
        own, where = made_token(token), None if key is None else Key.parsed(key)
        balancer = group.balancer
        if where is None and balancer.needs_key:
            raise ValueError("the group's balancer goes by a key: say where it is, as key='header:x-session'")
        limits = Limits(
            timeout_s=timeout_s,
            patience_s=0,
            resends=resends,
            body_bytes=max_body_bytes,
            held_bytes=max_body_bytes,
        )
        check = group._open  # noqa: SLF001 - made for this package
        app = Caller(balancer, _checked(methods), limits, where, check)
        super().__init__(app, own, host, port, max_connections, header_timeout_s, idle_timeout_s)


def _checked(methods: Any) -> Sequence[str]:
    if isinstance(methods, str) or not all(isinstance(method, str) for method in methods):
        raise TypeError(f"methods are a sequence of names, as in [{methods!r}]")
    if not methods or not all(method.isidentifier() and not method.startswith("_") for method in methods):
        raise ValueError(f"methods are names of public methods, and there is at least one; not {methods!r}")
    return tuple(methods)
