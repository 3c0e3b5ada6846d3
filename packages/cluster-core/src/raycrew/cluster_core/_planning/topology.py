"""Frozen values that say where things are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DOMAIN_LABEL = "ray.io/gpu-domain"  # Ray's own label for nodes that share one NVLink domain.
RESOURCE_STEP = 10_000  # Ray counts resources in ten-thousandths.
# Of these Ray knows which device it gives to whom; any other resource is only a number.
RESOURCES_WITH_DEVICES = frozenset(
    {"GPU", "NPU", "TPU", "HPU", "neuron_cores", "RBLN", "FURIOSA", "TTNPU", "MBLT"}
)
BOOKKEEPING = re.compile(r"^node:|^memory$|^object_store_memory$|_group_")  # Resources that are only Ray's.


@dataclass(frozen=True, slots=True)
class Bundle:
    """One reserved share of one node.

    Attributes:
        index: Position in the cluster's order, which is (node, device index).
        node_index: Logical node as the user listed them; nodes without bundles keep their number.
        node_id: Ray node id, hexadecimal. Never an address: several nodes can share one.
        node_address: IP address of the node, for people and for rendezvous.
        resources: What the bundle holds, in Ray's names and units.
        device_index: Physical device on its node, the first of several; None while it is not known, and where
            slots share several.
    """

    index: int
    node_index: int
    node_id: str
    node_address: str
    resources: Mapping[str, float] = field(default_factory=dict)
    device_index: int | None = None


@dataclass(frozen=True, slots=True)
class NodeState:
    """What one physical node has, and how much of it is free.

    Attributes:
        node_id: Ray node id, hexadecimal.
        address: IP address of the node, for people.
        total: Resources of the empty node, in Ray's names and units.
        free: The part that nobody has reserved.
        labels: Ray's labels of the node.
        draining: Whether it is going to leave the cluster, so that nothing new is placed on it.
    """

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes of one group meet.

    Attributes:
        node_id: Ray node id of the node that the ports are leased on.
        address: IP address of that node.
        ports: Leased TCP ports, in ascending order.
    """

    node_id: str
    address: str
    ports: tuple[int, ...]

    @property
    def port(self) -> int:
        """The first leased port."""
        return self.ports[0]

    @property
    def endpoint(self) -> str:
        """Address and first port as in URLs, an IPv6 address in brackets."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker of an occupant: its rank and the bundle it sits on.

    Attributes:
        rank: Rank of the worker in its group.
        bundle_index: `Bundle.index` of the bundle that it occupies.
        share: Part of the bundle that it may use, from 0 (exclusive) to 1.
        tied_group: Which tied group it belongs to, or None.
        state: What it is up to, for a drawing that says so.
    """

    rank: int
    bundle_index: int
    share: float = 1.0
    tied_group: int | None = None
    state: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a Ray cluster, by what Ray can tell later of whether it is still there.

    Attributes:
        job_id: The job that it works for, hexadecimal.
        node_id: Ray node id, or an empty string outside the cluster.
        worker_id: Ray's id of the process, or an empty string outside the cluster.
        actor_id: The actor that it is, or an empty string.
    """

    job_id: str
    node_id: str = ""
    worker_id: str = ""
    actor_id: str = ""
