"""`init_ray`: joining a Ray cluster or starting one, and leaving things as they were."""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raycrew.cluster_core import _ray
from raycrew.cluster_core._connection import discovery as _discovery
from raycrew.cluster_core._connection.addresses import check_address, check_reachable, is_same
from raycrew.cluster_core._connection.config import ClusterConfig
from raycrew.cluster_core._connection.connection import RayConnection, changing
from raycrew.cluster_core._connection.environment import (
    DEFAULT_POLICY,
    EnvironmentPolicy,
    Secrets,
    collect_secrets,
)
from raycrew.cluster_core._connection.folders import (
    check_folder,
    check_session_folder,
    folder_of_sessions,
    link_logs,
)
from raycrew.cluster_core._connection.proxy import LIMITS, check_proxy_answers, with_tries
from raycrew.cluster_core._connection.target import Target, target_of
from raycrew.cluster_core._connection.token import child_authentication, protect_token
from raycrew.cluster_core.errors import ClusterUnreachableError

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class _Membership:
    """What this process brings along, whatever it joins."""

    namespace: str | None
    policy: EnvironmentPolicy
    secrets: Secrets


def init_ray(
    address: str | None = None,
    *,
    config: ClusterConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
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

    The address is the argument, else the configuration's, else `RAY_ADDRESS`. Without one a cluster on this
    machine is joined if this process descends from one of its workers, if a Slurm job or `ray start` made
    it, or if raycrew started it for the same visible devices. Only if there is none is a fresh one started.
    "auto" is the same without the last step; "local" is the last step alone. The connection's `why`, and a
    line of the log (level INFO), say which it was.

    Calling it again, from any thread, gives the same connection, for as long as that lasts. `os.environ`, the
    loggers and signal handlers of this process stay as they are.

    Args:
        address: `host:port`, `ray://host:port`, "auto" or "local". Through a `ray://` proxy streaming
            generators don't work, calls are about three times as slow, and large puts are slower still.
        config: A `ClusterConfig`, a mapping of its values, or a YAML file of them; arguments win over it.
        log_dir: Folder in which a link named `ray` to the logs of a cluster started here is put.
        namespace: Namespace of named actors; Ray makes one up by default.
        num_cpus: CPUs of a cluster started here, with the next four. All five are refused with an explicit
            address.
        num_gpus: Its GPUs.
        resources: Its other resources.
        object_store_memory: Size of its object store, in bytes.
        temp_dir: Its folder for sessions, of at most 43 characters. By default one below a folder of this
            user's alone, `raycrew-UID` among temporary files, where `RAY_TMPDIR` names no other.
        forward_env: A policy, or names and patterns to forward besides the default policy's; None is nothing.
            What of it holds credentials, `$NAME` (which Ray would replace) or bytes that are no UTF-8 is
            handed over as a secret: worker groups get it, plain tasks and actors do not.
            Workers of a cluster started here inherit this process's environment in any case.
        secrets: Names of variables (or a mapping) that worker groups hand to workers apart from the
            runtime environment, which anybody can read.
        dashboard: Whether a cluster started here gets a dashboard, on the loopback interface; a string is
            the interface to bind. Off by default.
        timeout_s: Seconds until an address that does not answer is given up. A `ray://` proxy that answers is
            waited for as long as Ray does (30 s), up to three times while its server does not come up.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The address is malformed or a path, or options and address contradict one another.
        NoClusterError: "auto" found no cluster.
        ClusterUnreachableError: Nothing at the address answers.
        ClusterAuthenticationError: The cluster refuses this process's token.
        ClusterError: This process was forked from one that is connected to Ray.

    Examples:
        >>> connection = init_ray()  # joins a cluster, or starts one on this machine
        >>> init_ray() is connection  # there is one in a process
        True
    """
    given = {
        "address": address,
        "log_dir": log_dir,
        "namespace": namespace,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "resources": resources,
        "object_store_memory": object_store_memory,
        "temp_dir": temp_dir,
        "forward_env": None if forward_env is DEFAULT_POLICY else _policy(forward_env),
        "secrets": secrets or None,
        "dashboard": dashboard,
    }
    settings = {**_configured(config), **{name: value for name, value in given.items() if value is not None}}
    wanted = settings.pop("address", None)
    check_address(wanted)
    policy = _policy(settings.pop("forward_env", DEFAULT_POLICY))
    asked = collect_secrets(settings.pop("secrets", ()))
    secrets = Secrets({**policy.confidential(os.environ), **asked})
    membership = _Membership(settings.pop("namespace", None), policy, secrets)
    if (log_folder := settings.pop("log_dir", None)) is not None:
        check_folder(log_folder, "log_dir")
    start = _StartOptions(**{**settings, "temp_dir": _checked_temp_dir(settings.get("temp_dir"))})
    with changing.here:
        known = RayConnection.current()
        RayConnection.of_process = _connect(known, wanted, membership, start, timeout_s, log_folder)
        return RayConnection.of_process


def _connect(
    current: RayConnection | None,
    wanted: str | None,
    membership: _Membership,
    start: _StartOptions,
    timeout_s: float,
    log_folder: str | os.PathLike[str] | None,
) -> RayConnection:
    if _ray.Session.current() is not None:
        return _reuse(current, wanted, membership)
    _ray.check_not_forked()
    if membership.secrets:
        logger.info("worker groups alone, no plain tasks, get %r", membership.secrets)
    target = target_of(wanted, os.environ, start.temp_dir)
    if target.address is not None:
        _check_joinable(target, start)
        connection = _join(target.address, target.why, membership, timeout_s)
        logger.info("joined the cluster at %s: %s", connection.address, target.why)
        return connection
    connection = _start(start, target.why, membership)
    logger.info("started a cluster at %s: %s", connection.address, target.why)
    try:
        link_logs(log_folder, connection.session_dir)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_joinable(target: Target, start: _StartOptions) -> None:
    """Refuse options for a cluster that was named and runs; warn of them where one was found."""
    if not start.given():
        return
    if not target.is_found:
        raise ValueError(f"{start.given()} can't be given for a running cluster; {target.address} is one")
    logger.warning("%s say nothing to the running cluster at %s", start.given(), target.address)


def _configured(config: ClusterConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        config = ClusterConfig.from_mapping(config)
    elif not isinstance(config, ClusterConfig):
        config = ClusterConfig.from_file(config)
    return config.connection_options()


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
    check_session_folder(path, "temp_dir", os.environ)
    return path


def _reuse(current: RayConnection | None, address: str | None, membership: _Membership) -> RayConnection:
    connection = current or RayConnection(
        address=_ray.cluster_address(),
        started_here=False,
        why="Ray was connected to it before",
        owns_driver=False,
        dashboard_url=None,
        policy=membership.policy,
        secrets=membership.secrets,
        authentication=child_authentication(os.environ),
    )
    if address not in (None, "auto", "local") and not is_same(address, connection.address):
        raise ValueError(
            f"this process is connected to {connection.address}; close that before joining {address}"
        )
    if current is not None:
        current.use_again(membership.secrets)
    else:
        logger.info("Ray was connected to %s before; it is left running at the end", connection.address)
    return connection


def _start(options: _StartOptions, why: str, membership: _Membership) -> RayConnection:
    temp_dir = options.temp_dir or folder_of_sessions(os.environ)
    protect_token(os.environ)
    tag = _discovery.devices_tag(os.environ)
    host = options.dashboard if isinstance(options.dashboard, str) else "127.0.0.1"
    context, changed = _ray.init(
        address="local",
        namespace=membership.namespace,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        resources=dict(options.resources) if options.resources else None,
        object_store_memory=options.object_store_memory,
        include_dashboard=bool(options.dashboard),
        dashboard_host=host,
        labels={_discovery.DEVICES_LABEL: tag or "none"},
        **({"_temp_dir": temp_dir} if temp_dir else {}),
    )
    return RayConnection(
        address=_ray.cluster_address(),
        started_here=True,
        why=why,
        owns_driver=True,
        dashboard_url=_url(context.dashboard_url),
        policy=membership.policy,
        secrets=membership.secrets,
        session_dir=context.address_info.get("session_dir"),
        authentication=child_authentication({**os.environ, **changed}),
    )


def _join(address: str, why: str, membership: _Membership, timeout_s: float) -> RayConnection:
    check_reachable(address, timeout_s)
    if "://" in address:
        check_proxy_answers(address, timeout_s, os.environ)
        logger.info("%s is a proxy: %s", address, LIMITS)
    else:
        _ray.check_cluster_answers(address, timeout_s)
    forwarded = membership.policy.forwarded(os.environ)
    environment: dict[str, Any] = {"runtime_env": {"env_vars": forwarded}} if forwarded else {}
    join = partial(_ray.init, address=address, namespace=membership.namespace, **environment)
    try:
        context, changed = with_tries(join, address) if "://" in address else join()
    except ConnectionError as error:
        raise ClusterUnreachableError(f"joining {address} failed: {error}", address) from error
    return RayConnection(
        address=address
        if "://" in address
        else _ray.cluster_address(),  # "localhost" is another one elsewhere
        started_here=False,
        why=why,
        owns_driver=True,
        dashboard_url=_url(context.dashboard_url),
        policy=membership.policy,
        secrets=membership.secrets,
        authentication=child_authentication({**os.environ, **changed}),
    )


def _url(dashboard: str | None) -> str | None:
    if not dashboard:
        return None
    return dashboard if "://" in dashboard else f"http://{dashboard}"
