"""What the running cluster has, what is free, and who holds the rest."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from raycrew.cluster_core._planning import BOOKKEEPING, DOMAIN_LABEL, RESOURCE_STEP, NodeState
from raycrew.cluster_core._ray import questions
from raycrew.cluster_core._ray import status as _ray_status
from raycrew.cluster_core._ray.gate import check_connected


def node_states(domain_label: str = DOMAIN_LABEL) -> list[NodeState]:
    """All living nodes of the cluster that this process is connected to, as `plan_cluster` takes them.

    They are ordered by (domain, address, node id), the same each time. Those that are being drained are among
    them, and marked so.

    Args:
        domain_label: Which label of a node names its domain.

    Raises:
        ClusterError: This process is not connected to Ray.
        GetTimeoutError: Ray's control service does not answer.
    """
    check_connected()
    nodes = _ray_status.unordered_nodes()
    return sorted(nodes, key=lambda n: (n.labels.get(domain_label, ""), _address_key(n.address), n.node_id))


def holders_by_node(nodes: Sequence[NodeState]) -> dict[str, list[str]]:
    """Who holds something on each node, by node id, with what they hold.

    Placement groups, then actors outside of them, then what is in use beyond that, of which Ray does not tell
    whose it is without its dashboard.
    """
    held: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for group in questions.group_states():
        if group.state == "REMOVED":
            continue
        for node_id, bundle in zip(group.node_ids, group.bundles, strict=False):
            held[node_id][f"placement group {group.name or 'without a name'!r}"].update(bundle)
    for actor in _ray_status.actor_states():
        if actor.resources:
            who = f"actor {actor.name!r}" if actor.name else f"actors of {actor.class_name}"
            held[actor.node_id][who].update(actor.resources)
    for node in nodes:
        if rest := _rest(node, held[node.node_id].values()):
            held[node.node_id]["tasks, or what was freed a moment ago"].update(rest)
    return {
        node_id: [f"{who} ({_amounts(amounts)})" for who, amounts in holders.items()]
        for node_id, holders in held.items()
        if holders
    }


def _rest(node: NodeState, known: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What is in use on a node beyond what is known."""
    sums: Counter[str] = Counter()
    for amounts in known:
        sums.update(amounts)
    rest = {
        name: total - node.free.get(name, 0.0) - sums[name]
        for name, total in node.total.items()
        if not BOOKKEEPING.search(name)
    }
    return {name: amount for name, amount in rest.items() if amount > 0.5 / RESOURCE_STEP}


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items()))


def _address_key(address: str) -> tuple[int, tuple[int, ...], str]:
    """Numeric order for IPv4, so that 10.0.0.10 comes after 10.0.0.9."""
    parts = address.split(".")
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        return 0, tuple(int(part) for part in parts), ""
    return 1, (), address
