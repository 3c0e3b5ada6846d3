"""The usual troubles of Ray clusters: found one by one, each with what to do about it."""

import os
import platform
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core import _ray
from raycrew.cluster_core._connection import (
    RayConnection,
    check_reachable,
    connection_advice,
    default_token_file,
    init_ray,
)
from raycrew.cluster_core._ports import default_port_range, ephemeral_range
from raycrew.cluster_core.errors import ClusterError, PortsExhaustedError

State = Literal["good", "doubtful", "bad", "skipped"]

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 1 << 30
_LEAST_FILES = 8192
_SLOW_GCS_S = 1.0
_LARGEST_SKEW_S = 5.0
_STYLES = {"good": "green", "doubtful": "yellow", "bad": "red", "skipped": "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at.
        state: "good", "doubtful", "bad", or "skipped" where there was nothing to look at.
        detail: What was seen.
        advice: What to do about it; empty where nothing needs to be done.
    """

    check: str
    state: State
    detail: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node says of itself.

    Attributes:
        host: Host name.
        ray: Version of Ray.
        python: Version of Python.
        shared_bytes: Size of its shared memory; 0 where there is none.
        open_files: How many files a process may open.
        clock_s: Its clock when it was asked, in seconds since the epoch.
        ephemeral: First and last ephemeral port.
    """

    host: str
    ray: str
    python: str
    shared_bytes: int
    open_files: int
    clock_s: float
    ephemeral: tuple[int, int]


def read_node_facts() -> NodeFacts:
    """Look at this node."""
    shared = shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    return NodeFacts(
        platform.node(),
        version("ray"),
        platform.python_version(),
        shared,
        files,
        time.time(),
        ephemeral_range(),
    )


def examine(
    address: str | None = "auto",
    port_range: tuple[int, int] | None = None,
    beside: Callable[[], Sequence[Finding]] = tuple,
) -> list[Finding]:
    """Check this machine, and the cluster at an address.

    Args:
        address: Where the cluster is; None checks this machine alone.
        port_range: Ports that are going to be leased; by default the default range.
        beside: What else is found while this process is connected to the cluster.
    """
    here = {"this machine": read_node_facts()}
    own = [check_token_file(os.environ), check_uv_run(os.environ, _ancestors())]
    if address is None:
        return [*_examine_nodes(here, port_range), *own]
    try:
        connection = init_ray(address)
    except ClusterError as error:
        return [*_examine_nodes(here, port_range), *own, no_connection(error)]
    with connection:
        return [*own, *_examine_cluster(connection, here, port_range), *beside()]


def no_connection(error: ClusterError) -> Finding:
    """The cluster could not be examined."""
    advice = f"{connection_advice(error)} --local checks this machine alone.".strip()
    return Finding("connection", "bad", f"{type(error).__name__}: {error}", advice)


def _examine_nodes(facts: Mapping[str, NodeFacts], port_range: tuple[int, int] | None) -> list[Finding]:
    return [check_shared_memory(facts), check_open_files(facts), check_ports(facts, port_range)]


def _examine_cluster(
    connection: RayConnection, here: Mapping[str, NodeFacts], port_range: tuple[int, int] | None
) -> list[Finding]:
    started = time.monotonic()
    nodes = _ray.node_states()
    answer_s = time.monotonic() - started
    asked = time.time()
    facts = {node_id[:8]: found for node_id, found in connection.run_on_each_node(read_node_facts, 60.0)}
    silent = [node.node_id[:8] for node in nodes if node.node_id[:8] not in facts]
    return [
        Finding("connection", "good", f"{connection.address}, {len(nodes)} node{'s' * (len(nodes) != 1)}"),
        check_gcs(answer_s),
        check_silent_nodes(silent),
        check_versions({**here, **facts}),
        check_clocks(facts, asked, time.time()),
        *_examine_nodes({**here, **facts}, port_range),
        check_groups(_ray.group_states(), _ray.leftover_groups()),
        check_dashboard(connection.dashboard_url),
    ]


def check_gcs(answer_s: float) -> Finding:
    """Whether the cluster's control service answers quickly."""
    detail = f"answered in {answer_s * 1000:.0f} ms"
    if answer_s <= _SLOW_GCS_S:
        return Finding("GCS", "good", detail)
    return Finding(
        "GCS",
        "doubtful",
        detail,
        "It is busy: look at the head node's load, and at how many small tasks run.",
    )


def check_silent_nodes(silent: Sequence[str]) -> Finding:
    """Whether every node takes a task."""
    if not silent:
        return Finding("nodes", "good", "every node takes tasks")
    return Finding(
        "nodes",
        "bad",
        f"no answer from {', '.join(silent)}",
        "See raylet.out in the session's logs on those nodes.",
    )


def check_versions(facts: Mapping[str, NodeFacts]) -> Finding:
    """Whether all nodes and this process run the same Ray and Python."""
    kinds = {(fact.ray, fact.python.rpartition(".")[0]) for fact in facts.values()}
    patches = {fact.python for fact in facts.values()}
    if len(kinds) == 1 and len(patches) == 1:
        [fact, *_] = facts.values()
        return Finding("versions", "good", f"Ray {fact.ray}, Python {fact.python} everywhere")
    detail = "; ".join(f"{name}: Ray {fact.ray}, Python {fact.python}" for name, fact in facts.items())
    return Finding(
        "versions",
        "bad" if len(kinds) > 1 else "doubtful",
        detail,
        "Install the same Ray and Python on all nodes and in this environment.",
    )


def check_clocks(facts: Mapping[str, NodeFacts], asked: float, answered: float) -> Finding:
    """Whether the nodes' clocks agree with this machine's."""
    off = {
        name: round(max(asked - fact.clock_s, fact.clock_s - answered), 1)
        for name, fact in facts.items()
        if not asked - _LARGEST_SKEW_S <= fact.clock_s <= answered + _LARGEST_SKEW_S
    }
    if not off:
        return Finding("clocks", "good", f"within {_LARGEST_SKEW_S:g} s of one another")
    return Finding(
        "clocks", "doubtful", f"seconds off: {off}", "Switch time synchronisation on (chrony, ntpd)."
    )


def check_shared_memory(facts: Mapping[str, NodeFacts]) -> Finding:
    """Whether there is shared memory for the object store."""
    sizes = {name: f"{fact.shared_bytes / (1 << 30):.1f} GiB" for name, fact in facts.items()}
    least = min(fact.shared_bytes for fact in facts.values())
    detail = f"/dev/shm: {_grouped(sizes)}"
    if least >= _LEAST_SHARED_BYTES:
        return Finding("shared memory", "good", detail)
    advice = "Ray takes slow files instead. Docker: --shm-size; Kubernetes: an emptyDir with medium Memory."
    return Finding("shared memory", "bad", detail, advice)


def check_open_files(facts: Mapping[str, NodeFacts]) -> Finding:
    """Whether processes may open enough files."""
    limits = {
        name: "no limit" if f.open_files == sys.maxsize else str(f.open_files) for name, f in facts.items()
    }
    detail = f"limit: {_grouped(limits)}"
    if min(fact.open_files for fact in facts.values()) >= _LEAST_FILES:
        return Finding("open files", "good", detail)
    return Finding(
        "open files", "doubtful", detail, f"Raise it before Ray starts: ulimit -n {8 * _LEAST_FILES}."
    )


def check_ports(facts: Mapping[str, NodeFacts], port_range: tuple[int, int] | None) -> Finding:
    """Whether the ports to lease stay clear of those that outgoing connections get."""
    clashes = []
    for name, fact in facts.items():
        low, high = fact.ephemeral
        try:
            first, last = port_range or default_port_range(fact.ephemeral)
        except PortsExhaustedError as error:
            return Finding("ports", "bad", f"{name}: {error}", "Raise the lower end of the ephemeral range.")
        if first <= high and low <= last:
            clashes.append(f"{name}: {first}-{last} reaches into the ephemeral ports {low}-{high}")
    if not clashes:
        ranges = {name: "{}-{}".format(*fact.ephemeral) for name, fact in facts.items()}
        return Finding("ports", "good", f"clear of the ephemeral ports {_grouped(ranges)}")
    advice = "Pass a port_range below them, or `sysctl net.ipv4.ip_local_reserved_ports`."
    return Finding("ports", "bad", "; ".join(clashes), advice)


def check_groups(groups: Iterable[_ray.GroupState], leftover: Sequence[str] = ()) -> Finding:
    """Whether placement groups are stuck, or outlived whoever made them."""
    counts = Counter(group.state for group in groups if group.state != "REMOVED")
    stuck = [
        f"{g.name or 'without a name'} ({g.state})" for g in groups if g.state not in ("REMOVED", "CREATED")
    ]
    if not stuck and not leftover:
        return Finding("placement groups", "good", f"{counts['CREATED']} created, none waiting or left over")
    found, advice = [], []
    if stuck:
        found.append(f"not placed: {', '.join(stuck)}")
        advice.append("A driver waits for those that are not placed; `status` says who holds what.")
    if leftover:
        found.append(f"left over by drivers that ended: {', '.join(leftover)}")
        advice.append(
            "Detached groups keep what they hold: in their namespace, "
            "ray.util.remove_placement_group(ray.util.get_placement_group(NAME)) removes one."
        )
    return Finding("placement groups", "doubtful", "; ".join(found), " ".join(advice))


def check_dashboard(url: str | None) -> Finding:
    """Whether the dashboard, if there is one, can be reached from here."""
    if url is None:
        return Finding("dashboard", "skipped", "there is none; nothing here needs it")
    try:
        check_reachable(url.split("://", 1)[-1].rstrip("/"), 5.0)
    except (ClusterError, ValueError) as error:
        advice = (
            "It listens on its own machine's loopback interface by default: forward the port with ssh -L."
        )
        return Finding("dashboard", "doubtful", f"{url}: {error}", advice)
    return Finding("dashboard", "good", url)


def check_token_file(environ: Mapping[str, str], token_file: Path | None = None) -> Finding:
    """Whether others can read the token."""
    try:
        path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or token_file or default_token_file())
    except ClusterError as error:
        return Finding("token", "doubtful", str(error), "Set HOME.")
    if not path.exists():
        return Finding("token", "skipped", f"there is no {path}")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding(
            "token", "bad", f"{path} has mode {mode:04o}", f"Others can read it: chmod 600 {path}."
        )
    return Finding("token", "good", f"{path} has mode {mode:04o}")


def check_uv_run(environ: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> Finding:
    """Whether Ray would put all workers into the environment of `uv run`."""
    under = any(Path(command[0]).name == "uv" and "run" in command for command in ancestors if command)
    if not under or environ.get("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "1").lower() in ("0", "false"):
        return Finding("uv run", "good", "Ray leaves the workers' environments alone")
    advice = "Set RAY_ENABLE_UV_RUN_RUNTIME_ENV=0, or worker environments of their own are ignored."
    return Finding(
        "uv run", "doubtful", "this process runs under `uv run`, which Ray repeats for every worker", advice
    )


def _ancestors() -> list[list[str]]:
    commands = []
    for process in psutil.Process().parents():
        try:
            commands.append(process.cmdline())
        except psutil.Error:
            continue
    return commands


def _grouped(values: Mapping[str, str]) -> str:
    """Say one value once, and name the nodes only where they differ."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def table_of(findings: Iterable[Finding]) -> Table:
    """Findings, and advice below those that need it, for people."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", width=8)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.state]
        said = Text.assemble((finding.check, "bold"), f": {finding.detail}")
        table.add_row(Text(finding.state, style=style), said)
        if finding.advice:
            table.add_row("", Text(finding.advice, style=style))
    return table


def print_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    """Print findings, and advice below those that need it."""
    (console or Console()).print(table_of(findings))
