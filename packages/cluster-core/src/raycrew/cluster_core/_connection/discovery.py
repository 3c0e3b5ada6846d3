"""Which Ray clusters run on this machine, and which of them a driver without an address joins."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil

from raycrew.cluster_core._connection.folders import temporary_folder
from raycrew.cluster_core._connection.token import authentication
from raycrew.cluster_core._devices import VISIBILITY_VARIABLES
from raycrew.cluster_core.errors import NoClusterError

DEVICES_LABEL = "raycrew.devices"
SLURM_RESOURCES = ("slurm_managed_ray_cluster",)
SLURM_LABEL = "raycrew.slurm-job"
_RECORD_LETTERS = 500
_NO_DEVICE = {"-1", "none", "void", "nodevfiles"}  # What people and launchers write for "no device".
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/davinci[0-9]*", "/dev/accel[0-9]*")


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that node processes on this machine belong to.

    Attributes:
        address: `host:port` of its GCS.
        labels: Labels of these nodes.
        resources: Names of their resources.
        session_dir: Folder of its session.
        authentication: Variables by which its node processes here find their token.
        steps_up: How many steps above this process its nearest node process is that started this one, or an
            ancestor of it; infinity where none did.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: frozenset[str] = frozenset()
    session_dir: str = ""
    authentication: Mapping[str, str] = field(default_factory=dict, repr=False)
    steps_up: float = inf

    @property
    def is_slurm_managed(self) -> bool:
        """Whether a Slurm job script started it."""
        return SLURM_LABEL in self.labels or not self.resources.isdisjoint(SLURM_RESOURCES)

    def joined_with(self, other: "RunningCluster") -> "RunningCluster":
        """The same cluster as another of its nodes shows it; only one of them may carry a tag."""
        labels, resources = {**other.labels, **self.labels}, self.resources | other.resources
        return RunningCluster(
            self.address,
            labels,
            resources,
            self.session_dir or other.session_dir,
            self.authentication or other.authentication,
            min(self.steps_up, other.steps_up),
        )


def devices_tag(environ: Mapping[str, str], device_files: Sequence[str] = _DEVICE_FILES) -> str | None:
    """Name the set of devices that this process sees, whatever their order; None where it sees none.

    A driver joins a cluster that another raycrew driver started only if both see the same devices. Without
    any, nothing says that they belong together, and each driver gets a cluster of its own.
    """
    for name in sorted(VISIBILITY_VARIABLES & set(environ)):
        ids = sorted({part.strip() for part in environ[name].split(",") if part.strip()})
        if {one.lower() for one in ids} <= _NO_DEVICE:
            return None
        text = "_".join(ids)
        return text if re.fullmatch(r"[a-zA-Z0-9]([\w.-]{0,61}[a-zA-Z0-9])?", text) else _digest(text)
    root = Path("/")
    present = any(any(root.glob(pattern.lstrip("/"))) for pattern in device_files)
    return "all" if present else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def choose(
    running: Iterable[RunningCluster], tag: str | None, recorded: str | None, slurm_job: str | None
) -> tuple[RunningCluster, str] | None:
    """Pick the cluster that a driver without an address joins, and say why; None where it starts its own.

    In this order: the one whose workers this process belongs to, of nested ones the innermost; one that this
    Slurm job started, or that carries a Slurm tag; the one that `ray start` recorded as current; one that
    raycrew started for the same devices.

    Args:
        running: Clusters with a node on this machine.
        tag: What `devices_tag` says of this process.
        recorded: Address that `ray start` wrote down, if any.
        slurm_job: This process's Slurm job, if any.
    """
    clusters = sorted(running, key=lambda one: one.steps_up)
    tests: tuple[tuple[str, Callable[[RunningCluster], bool]], ...] = (
        ("a worker of it started this process", lambda one: one.steps_up < inf),
        (
            f"Slurm job {slurm_job} started it",
            lambda one: slurm_job is not None and one.labels.get(SLURM_LABEL) == slurm_job,
        ),
        (
            "a Slurm job started it",
            lambda one: one.is_slurm_managed and one.labels.get(SLURM_LABEL, slurm_job) == slurm_job,
        ),
        (
            "`ray start` made it",
            lambda one: one.address == recorded and DEVICES_LABEL not in one.labels,
        ),
        (
            "raycrew started it for the same devices",
            lambda one: tag is not None and one.labels.get(DEVICES_LABEL) == tag,
        ),
    )
    return next(((one, why) for why, test in tests for one in clusters if test(one)), None)


def recorded_address(environ: Mapping[str, str], temp_dir: str | None = None) -> str | None:
    """The address that the last `ray start` on this machine wrote down."""
    folder = Path(temp_dir or temporary_folder(environ) / "ray")
    try:
        return _text_of_ones_own(folder / "ray_current_cluster").strip() or None
    except OSError:
        return None


def _text_of_ones_own(path: Path) -> str:
    """What is in a small file; nothing where it is another user's, who may have put anything there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would keep us waiting
    with os.fdopen(descriptor, errors="replace") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            return ""
        return file.read(_RECORD_LETTERS)


def running_clusters() -> list[RunningCluster]:
    """Clusters of this user with a node process on this machine, the newest last."""
    found: dict[str, RunningCluster] = {}
    steps_up = _ancestors()
    for process in _node_processes():
        cluster = parse_node_command(process.info["cmdline"])
        if cluster is not None:
            around = steps_up.get(process.pid, inf)
            cluster = replace(cluster, authentication=_authentication(process), steps_up=around)
            known = found.get(cluster.address)
            found[cluster.address] = known.joined_with(cluster) if known else cluster
    return list(found.values())


def _node_processes() -> list[psutil.Process]:
    """Those of this user, in the order of their starts."""
    found = []
    for process in psutil.process_iter(["name", "uids", "cmdline", "create_time"]):
        uids = process.info["uids"]
        if process.info["name"] == "raylet" and uids and uids.real == os.getuid() and process.info["cmdline"]:
            found.append(process)
    return sorted(found, key=lambda process: process.info["create_time"] or 0.0)


def _ancestors() -> dict[int, int]:
    """How many steps above this process each of its ancestors is, as far up as they live and can be seen."""
    found: dict[int, int] = {}
    process: psutil.Process | None = psutil.Process()
    with suppress(psutil.Error):
        while process is not None and (process := process.parent()) is not None:
            found[process.pid] = len(found) + 1
    return found


def _authentication(process: psutil.Process) -> dict[str, str]:
    try:
        return authentication(process.environ())
    except (psutil.Error, OSError):  # It ended meanwhile.
        return {}


def only_one(running: Iterable[RunningCluster]) -> RunningCluster | None:
    """The one cluster that a person means who names none, or None where there is none.

    Raises:
        NoClusterError: There are several; says which.
    """
    clusters = list(running)
    if len(clusters) > 1:
        addresses = tuple(cluster.address for cluster in clusters)
        told = f"several of your clusters run on this machine: {', '.join(addresses)}; name one of them"
        raise NoClusterError(told, running=addresses)
    return clusters[0] if clusters else None


def parse_node_command(command: Sequence[str]) -> RunningCluster | None:
    """Read a node process's command line."""
    options = dict(part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part)
    address = options.get("gcs-address")
    if not address:
        return None
    try:
        labels = json.loads(options.get("labels") or "{}")
    except ValueError:
        labels = {}
    names = options.get("static_resource_list", "").split(",")[::2]
    return RunningCluster(address, labels, frozenset(names), options.get("session_dir", ""))
