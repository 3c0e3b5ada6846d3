"""Joining a Ray cluster or starting one, and leaving things as they were."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import ray

from raycrew.cluster_core import _discovery, _ray_compat
from raycrew.cluster_core._addresses import check_address, check_reachable
from raycrew.cluster_core._environment import DEFAULT_POLICY, EnvironmentPolicy, Secrets, collect_secrets
from raycrew.cluster_core._node_calls import run_on_nodes
from raycrew.cluster_core._token import child_authentication, protect_token
from raycrew.cluster_core.errors import ClusterClosedError, ClusterError, NoClusterError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SOCKET_SUFFIX = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
_SOCKET_PATH_LIMIT = 107


class RayConnection:
    """This process's membership of a Ray cluster. A context manager.

    Attributes:
        address: `host:port` of the cluster, or the `ray://` address that was given.
        started_here: Whether this process started the cluster, which then ends with the connection.
        dashboard_url: Where the dashboard is, or None.
        namespace: Namespace of named actors.
        policy: What of the environment is forwarded to workers.
        secrets: What `init_ray(secrets=…)` collected; worker groups deliver it, nothing else shows it.
        session_dir: Folder of the cluster's session on this machine, or None.
    """

    def __init__(
        self,
        *,
        address: str,
        started_here: bool,
        owns_driver: bool,
        dashboard_url: str | None,
        policy: EnvironmentPolicy,
        secrets: Secrets,
        session_dir: str | None = None,
        authentication: Mapping[str, str] | None = None,
    ) -> None:
        self.address = address
        self.started_here = started_here
        self.dashboard_url = dashboard_url
        self.policy = policy
        self.secrets = secrets
        self.session_dir = session_dir
        self.namespace: str = ray.get_runtime_context().namespace
        self._owns_driver = owns_driver
        self._authentication = dict(authentication or {})
        self._uses = 1
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the connection is closed, by `close()` or by a shutdown of Ray."""
        return self._closed or not ray.is_initialized()

    def child_env(self) -> dict[str, str]:
        """Variables that let a child process join this cluster by `init_ray()` or `ray.init()`.

        A token is named by its file, never by its value, unless the value is all that this process has.

        Raises:
            ClusterClosedError: The connection is closed.
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
        return run_on_nodes(sorted(_ray_compat.live_node_ids()), fn, timeout_s)

    def use_again(self, secrets: Secrets) -> None:
        """Note one user more, whose `with` block will not end the connection of the others."""
        self._uses += 1
        self.secrets = Secrets({**self.secrets, **secrets})

    def close(self) -> None:
        """Leave the cluster, and end it if this process started it; idempotent.

        A runtime that was up before `init_ray` was called is left alone.
        """
        if not self._closed:
            self._closed = True
            if self._owns_driver and ray.is_initialized():
                ray.shutdown()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._uses -= 1
        if self._uses <= 0:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "started here" if self.started_here else "joined"
        return f"RayConnection({self.address}, {state})"

    def _check_open(self) -> None:
        if self.closed:
            raise ClusterClosedError(f"the connection to {self.address} is closed")


@dataclass(frozen=True, slots=True)
class _StartOptions:
    """What only a cluster that is started here can be given."""

    num_cpus: int | None = None
    num_gpus: int | None = None
    resources: Mapping[str, float] | None = None
    object_store_memory: int | None = None
    temp_dir: str | None = None
    dashboard: bool | str | None = None

    def given(self) -> list[str]:
        return [name for name in self.__slots__ if getattr(self, name) is not None]


_current: RayConnection | None = None


def init_ray(
    address: str | None = None,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    namespace: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    object_store_memory: int | None = None,
    temp_dir: str | os.PathLike[str] | None = None,
    forward_env: EnvironmentPolicy | Iterable[str] | None = DEFAULT_POLICY,
    secrets: Iterable[str] | Mapping[str, str] = (),
    dashboard: bool | str | None = None,
    timeout_s: float = 10.0,
) -> RayConnection:
    """Join a Ray cluster, or start one on this machine where there is none to join.

    The address is the argument, else `RAY_ADDRESS`. Without one a cluster on this machine is
    joined if a Slurm job or `ray start` made it, or if raycrew started it for the same visible devices.
    Only if there is none is a fresh one started. "auto" is the same without the last step; "local" is the
    last step alone.

    Calling it again gives the same connection. `os.environ`, the loggers and signal handlers of this process
    stay as they are.

    Args:
        address: `host:port`, `ray://host:port`, "auto" or "local".
        log_dir: Folder in which a link named `ray` to the logs of a cluster started here is put.
        namespace: Namespace of named actors; Ray makes one up by default.
        num_cpus: CPUs of a cluster started here, with the next four. All five are refused with an explicit
            address.
        num_gpus: Its GPUs.
        resources: Its other resources.
        object_store_memory: Size of its object store, in bytes.
        temp_dir: Its folder for sessions, of at most 43 characters.
        forward_env: A policy, or names and patterns to forward besides the default policy's; None is nothing.
            Workers of a cluster started here inherit this process's environment in any case.
        secrets: Names of variables (or a mapping) that worker groups hand to workers apart from the
            runtime environment, which anybody can read.
        dashboard: Whether a cluster started here gets a dashboard, on the loopback interface; a string is
            the interface to bind. Off by default.
        timeout_s: Seconds until an address that does not answer is given up.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The address is malformed or a path, or options and address contradict one another.
        NoClusterError: "auto" found no cluster.
        ClusterUnreachableError: Nothing at the address answers.
        ClusterAuthenticationError: The cluster refuses this process's token.
    """
    global _current
    check_address(address)
    policy = _policy(forward_env)
    collected = collect_secrets(secrets)
    options = _StartOptions(
        num_cpus, num_gpus, resources, object_store_memory, _checked_temp_dir(temp_dir), dashboard
    )
    if ray.is_initialized():
        _current = _reuse(_current, address, policy, collected)
        return _current
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else None
    target = named or address
    check_address(target)
    explicit = target not in (None, "auto", "local")
    if explicit and options.given():
        raise ValueError(f"{options.given()} can't be given for a running cluster; {target} is one")
    if not explicit and target != "local":
        target = _discovered(options) or ("local" if target is None else target)
    if target == "auto":
        raise NoClusterError("no running Ray cluster was found on this machine; pass its address, or 'local'")
    if target == "local" or target is None:
        _current = _start(options, namespace, policy, collected)
        _link_logs(log_dir, _current.session_dir)
    else:
        _current = _join(target, namespace, policy, collected, timeout_s)
    return _current


def _policy(forward_env: EnvironmentPolicy | Iterable[str] | None) -> EnvironmentPolicy:
    if isinstance(forward_env, EnvironmentPolicy):
        return forward_env
    if forward_env is None:
        return EnvironmentPolicy(allow=(), keep_device_flags=False)
    if isinstance(forward_env, str):
        raise TypeError(f"forward_env is a sequence of names and patterns, as in ({forward_env!r},)")
    return DEFAULT_POLICY.allowing(*forward_env)


def _checked_temp_dir(temp_dir: str | os.PathLike[str] | None) -> str | None:
    if temp_dir is None:
        return None
    path = str(Path(temp_dir).absolute())
    longest = _SOCKET_PATH_LIMIT - len(_SOCKET_SUFFIX)
    if len(os.fsencode(path)) > longest:
        raise ValueError(
            f"temp_dir {path!r} has {len(os.fsencode(path))} bytes; sockets below it allow {longest} at most"
        )
    return path


def _reuse(
    current: RayConnection | None, address: str | None, policy: EnvironmentPolicy, secrets: Secrets
) -> RayConnection:
    if current is None or current.closed:
        current = RayConnection(
            address=_ray_compat.cluster_address(),
            started_here=False,
            owns_driver=False,
            dashboard_url=None,
            policy=policy,
            secrets=secrets,
            authentication=child_authentication(os.environ),
        )
        logger.info("Ray was connected to %s before; it is left running at the end", current.address)
    else:
        current.use_again(secrets)
    if address not in (None, "auto", "local", current.address):
        raise ValueError(
            f"this process is connected to {current.address}; close that before joining {address}"
        )
    return current


def _discovered(options: _StartOptions) -> str | None:
    found = _discovery.choose(
        _discovery.running_clusters(),
        _discovery.devices_tag(os.environ),
        _discovery.recorded_address(os.environ, options.temp_dir),
        os.environ.get("SLURM_JOB_ID"),
    )
    if found is None:
        return None
    logger.info("joining the cluster at %s that runs on this machine", found.address)
    if options.given():
        logger.warning("%s say nothing to the running cluster at %s", options.given(), found.address)
    return found.address


def _start(
    options: _StartOptions, namespace: str | None, policy: EnvironmentPolicy, secrets: Secrets
) -> RayConnection:
    protect_token(os.environ)
    tag = _discovery.devices_tag(os.environ)
    host = options.dashboard if isinstance(options.dashboard, str) else "127.0.0.1"
    context, changed = _ray_compat.init(
        address="local",
        namespace=namespace,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        resources=dict(options.resources) if options.resources else None,
        object_store_memory=options.object_store_memory,
        include_dashboard=bool(options.dashboard),
        dashboard_host=host,
        labels={_discovery.DEVICES_LABEL: tag or "none"},
        **({"_temp_dir": options.temp_dir} if options.temp_dir else {}),
    )
    return RayConnection(
        address=_ray_compat.cluster_address(),
        started_here=True,
        owns_driver=True,
        dashboard_url=_url(context.dashboard_url),
        policy=policy,
        secrets=secrets,
        session_dir=context.address_info.get("session_dir"),
        authentication=child_authentication({**os.environ, **changed}),
    )


def _join(
    address: str, namespace: str | None, policy: EnvironmentPolicy, secrets: Secrets, timeout_s: float
) -> RayConnection:
    check_reachable(address, timeout_s)
    if "://" not in address:
        _ray_compat.check_cluster_answers(address, timeout_s)
    forwarded = policy.forwarded(os.environ)
    environment: dict[str, Any] = {"runtime_env": {"env_vars": forwarded}} if forwarded else {}
    context, changed = _ray_compat.init(address=address, namespace=namespace, **environment)
    return RayConnection(
        address=address,
        started_here=False,
        owns_driver=True,
        dashboard_url=_url(context.dashboard_url),
        policy=policy,
        secrets=secrets,
        authentication=child_authentication({**os.environ, **changed}),
    )


def _url(dashboard: str | None) -> str | None:
    if not dashboard:
        return None
    return dashboard if "://" in dashboard else f"http://{dashboard}"


def _link_logs(log_dir: str | os.PathLike[str] | None, session_dir: str | None) -> None:
    if log_dir is None or session_dir is None:
        return
    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "ray"
    if link.is_symlink():
        link.unlink()
    if link.exists():
        raise ClusterError(f"{link} is in the way of the link to Ray's logs in {session_dir}/logs")
    link.symlink_to(Path(session_dir) / "logs", target_is_directory=True)
