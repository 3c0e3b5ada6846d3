"""How the server of a replica is started: which command, on which ports, with which variables."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycrew.worker_groups.services._addresses import as_asked_here, as_known
from raycrew.worker_groups.services._endpoint import Endpoint, url_of
from raycrew.worker_groups.services._options import HOST_VARIABLE, PORTS_VARIABLE, ServiceOptions
from raycrew.worker_groups.services._replicas.process import ServerProcess

_SCRIPT = Path(__file__).parent.parent / "_asgi.py"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What all replicas of a service are told.

    Attributes:
        options: What the service is to be.
        host: Address that servers bind to; None for that of their node.
        token: What their clients have to know.
        port_range: First and last port to lease.
    """

    options: ServiceOptions
    host: str | None
    token: str | None = field(default=None, repr=False)
    port_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Where one server is.

    Attributes:
        host: Address that it binds to.
        address: Address that others know it by.
        ports: Its ports.
        rank: Number of the replica.
    """

    host: str
    address: str
    ports: tuple[int, ...]
    rank: int

    @property
    def asked_at(self) -> str:
        """Where it is asked from its own node."""
        return as_asked_here(self.host)


def site_of(spec: ReplicaSpec, node_address: str, ports: tuple[int, ...], rank: int) -> Site:
    """Where a server is to be on a node."""
    host = spec.host or node_address
    return Site(host, as_known(host, node_address), ports, rank)


def endpoint_of(spec: ReplicaSpec, site: Site) -> Endpoint:
    """Where others reach a server."""
    return Endpoint(url_of(site.address, site.ports[0]), spec.token, site.rank, site.ports)


def launch(spec: ReplicaSpec, site: Site) -> ServerProcess:
    """Start a server.

    Raises:
        ServiceStartError: It can't be started.
    """
    options, env = spec.options, dict(os.environ)
    env |= {HOST_VARIABLE: site.host, PORTS_VARIABLE: ",".join(map(str, site.ports))}
    if spec.token is not None and options.token_variable is not None:
        env[options.token_variable] = spec.token
    if not options.is_app:
        words = options.words(site.host, site.address, site.ports, site.rank)
        return ServerProcess(words, env, cwd=options.folder, hidden=spec.token)
    env.setdefault("PYTHONUNBUFFERED", "1")
    words = [sys.executable, "-P", str(_SCRIPT)]  # without the folder of that file as a place of modules
    told = json.dumps(_told(spec, site)).encode()
    return ServerProcess(words, env, cwd=options.folder, told=told, hidden=spec.token)


def _told(spec: ReplicaSpec, site: Site) -> dict[str, Any]:
    options = spec.options
    return {
        "app": options.server,
        "host": site.host,
        "port": site.ports[0],
        "token": spec.token,
        "open_path": options.ready.partition("?")[0] if options.ready and options.ready_is_open else None,
        "path": [*([] if options.folder is None else [options.folder]), *filter(None, sys.path)],
        "max_connections": options.max_connections,
        "grace_s": options.grace_s,
    }
