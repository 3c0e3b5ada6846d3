"""What the running cluster has, what is free, and who holds the rest."""

from collections import defaultdict

from raycrew.cluster_core import _ray_compat
from raycrew.cluster_core._topology import DOMAIN_LABEL, NodeState
from raycrew.cluster_core.errors import ClusterError


def take_census(domain_label: str = DOMAIN_LABEL) -> list[NodeState]:
    """All nodes that take work, ordered by (domain, address, node id), the same each time.

    Raises:
        ClusterError: This process is not connected to Ray.
    """
    check_connected()
    nodes = _ray_compat.node_states()
    return sorted(nodes, key=lambda n: (n.labels.get(domain_label, ""), _address_key(n.address), n.node_id))


def check_connected() -> None:
    """Refuse to go on without Ray, which would start one of its own accord.

    Raises:
        ClusterError: This process is not connected to Ray.
    """
    if not _ray_compat.is_connected():
        raise ClusterError("this process is not connected to Ray; call init_ray() first")


def holders_by_node() -> dict[str, list[str]]:
    """Placement groups that hold something on each node, by node id, with what they hold.

    Ray does not tell who holds resources outside of placement groups without its dashboard.
    """
    held: dict[str, list[str]] = defaultdict(list)
    for group in _ray_compat.group_states():
        if group.state == "REMOVED":
            continue
        amounts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for node_id, bundle in zip(group.node_ids, group.bundles, strict=False):
            for name, amount in bundle.items():
                amounts[node_id][name] += amount
        for node_id, sums in amounts.items():
            what = ", ".join(f"{amount:g} {name}" for name, amount in sorted(sums.items()))
            held[node_id].append(f"placement group {group.name or 'without a name'!r} ({what})")
    return dict(held)


def _address_key(address: str) -> tuple[int, tuple[int, ...], str]:
    """Numeric order for IPv4, so that 10.0.0.10 comes after 10.0.0.9."""
    parts = address.split(".")
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        return 0, tuple(int(part) for part in parts), ""
    return 1, (), address
