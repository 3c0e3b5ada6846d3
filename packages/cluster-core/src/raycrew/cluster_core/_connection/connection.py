"""This process's membership of a Ray cluster."""

import os
from collections.abc import Callable, Iterator, Mapping
from threading import RLock
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import ray

from raycrew.cluster_core import _ray
from raycrew.cluster_core._connection.environment import EnvironmentPolicy, Secrets
from raycrew.cluster_core._ray import PerProcess, run_on_nodes
from raycrew.cluster_core.errors import ClusterClosedError

T = TypeVar("T")

changing = PerProcess(RLock)  # One thread at a time joins, starts or leaves a cluster.


class RayConnection:
    """This process's membership of a Ray cluster.

    A context manager: the block of the call that made the connection closes it, those of later calls don't.

    Attributes:
        address: `host:port` of the cluster, or the `ray://` address that was given.
        started_here: Whether this process started the cluster, which then ends with the connection.
        why: What led to this cluster, as in "RAY_ADDRESS names it".
        dashboard_url: Where the dashboard is, or None.
        namespace: Namespace of named actors.
        policy: What of the environment is forwarded to workers.
        forwarded: What that was when the connection was made.
        secrets: What `init_ray(secrets=…)` collected, and what of the environment is allowed and holds
            credentials; worker groups deliver it, nothing else shows it.
        of_process: The last one that `init_ray` made here, closed or not; `current()` tells the open one.
        session: What tells this connection from any other one of this process.
        session_dir: Folder of the cluster's session on this machine, or None.
    """

    of_process: ClassVar["RayConnection | None"] = None

    def __init__(
        self,
        *,
        address: str,
        started_here: bool,
        why: str,
        owns_driver: bool,
        dashboard_url: str | None,
        policy: EnvironmentPolicy,
        secrets: Secrets,
        session_dir: str | None = None,
        authentication: Mapping[str, str] | None = None,
    ) -> None:
        self.address = address
        self.started_here = started_here
        self.why = why
        self.dashboard_url = dashboard_url
        self.policy = policy
        self.forwarded = policy.forwarded(os.environ)
        self.secrets = secrets
        self.session_dir = session_dir
        self.session = _ray.check_connected()
        with self.session.while_connected():
            self.namespace: str = ray.get_runtime_context().namespace
        self._owns_driver = owns_driver
        self._authentication = dict(authentication or {})
        self._calls, self._depth, self._ends_with_block = 1, 0, False
        self._closed = False

    @classmethod
    def current(cls) -> "RayConnection | None":
        """The open connection that `init_ray` gave to this process, or None; never connects.

        What delivers things to workers finds there the policy and the secrets.
        """
        found = cls.of_process
        return None if found is None or found.closed else found

    @property
    def closed(self) -> bool:
        """Whether it is closed, by `close()` or by a shutdown of Ray, whatever was joined since."""
        return self._closed or _ray.Session.current() != self.session

    def child_env(self) -> dict[str, str]:
        """Variables with which a child process joins this cluster by `init_ray()` or `ray.init()`.

        They are `RAY_ADDRESS` and those that say whether the cluster asks for a token, and where that is. A
        token is named by its file (of mode 0600 where raycrew made it), never by its value, unless the value
        is all that this process has. An environment can be read by processes of the same user and by root
        alone, unlike a command line, and is handed on to whatever the child starts: give it to children that
        may do all that the cluster allows. In a worker, `init_ray().child_env()` is for servers and tools
        that the worker starts.

        Raises:
            ClusterClosedError: The connection is closed.

        Examples:
            >>> import os, subprocess, sys
            >>> command = [sys.executable, "-c", "import ray; ray.init()"]
            >>> with init_ray() as connection:
            ...     done = subprocess.run(command, env={**os.environ, **connection.child_env()}, check=True)
        """
        self._check_open()
        return {"RAY_ADDRESS": self.address, **self._authentication}

    def run_on_each_node(
        self, fn: Callable[[], T], timeout_s: float | None = 120.0
    ) -> Iterator[tuple[str, T]]:
        """Run `fn` once on each live node of the cluster; yield (node id, result) as nodes finish.

        Nodes that can't take the call are left out with a warning.

        Raises:
            ClusterClosedError: The connection is closed.
            NodeCallError: `fn` raised on a node.
            NodeCallTimeoutError: A node did not finish within `timeout_s`.
        """
        self._check_open()
        return run_on_nodes(sorted(_ray.live_node_ids()), fn, timeout_s)

    def use_again(self, secrets: Secrets) -> None:
        """Note one call of `init_ray` more, whose `with` block does not end the connection of the first."""
        self._calls += 1
        self.secrets = Secrets({**self.secrets, **secrets})

    def close(self) -> None:
        """Leave the cluster, and end it if this process started it; idempotent.

        A runtime that was up before `init_ray` was called, or that came after this one, is left alone.
        """
        with changing.here:
            is_ours = not self.closed and self._owns_driver
            self._closed = True
            if is_ours:
                ray.shutdown()

    def __enter__(self) -> Self:
        self._check_open()
        if self._calls == 1:
            self._ends_with_block = True
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._ends_with_block:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "started here" if self.started_here else "joined"
        return f"RayConnection({self.address}, {state})"

    def _check_open(self) -> None:
        if self.closed:
            raise ClusterClosedError(
                f"the connection to {self.address} is closed; call init_ray() for a new one"
            )
