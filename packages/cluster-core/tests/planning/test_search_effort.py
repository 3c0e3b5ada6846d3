"""Ways that lead nowhere are left early: else what fits would not be found in the time that there is."""

import random

import pytest

from raycrew.cluster_core import NodeState, PlacementRequest
from raycrew.cluster_core._planning.bundle_packing import Effort
from raycrew.cluster_core._planning.searching import lay_parts

KINDS = [{"CPU": float(cpus), "GPU": float(gpus)} for cpus in range(1, 6) for gpus in range(3)]


class Counted(Effort):
    """An effort that is enough, and tells how much was spent."""

    spent = 0

    def spend(self, steps=1):
        self.spent += steps


def cut(chance, parts, most):
    """Parts in runs of at most so many."""
    while parts:
        size = chance.randint(1, most)
        yield tuple(parts[:size])
        parts = parts[size:]


def tight(chance, strategy, per_node, *, ordered):
    """Nodes that their bundles fill to the last CPU, but one that may have one less; then these mixed up."""
    held = [[chance.choice(KINDS) for _ in range(chance.randint(1, per_node))] for _ in range(6)]
    totals = [{name: sum(one[name] for one in mine) for name in ("CPU", "GPU")} for mine in held]
    totals[0]["CPU"] -= chance.choice([0, 1])
    labels = [{"ray.io/gpu-domain": "ab"[i % 2]} for i in range(6)]
    nodes = [NodeState(f"n{i}", "10.0.0.1", total, total, labels[i]) for i, total in enumerate(totals)]
    parts = [bundle for mine in held for bundle in mine]
    chance.shuffle(parts)
    bundles = tuple(cut(chance, parts, 3 if strategy in ("PACK", "SPREAD", "STRICT_SPREAD") else 1))
    return nodes, PlacementRequest(
        tuple(map(len, bundles)),
        strategy="STRICT_PACK" if strategy in ("DISTINCT", "SEGMENTS") else strategy,
        bundles=bundles,
        distinct_nodes=strategy == "DISTINCT",
        segment_size=(2 if len(bundles) % 2 == 0 else 1) if strategy == "SEGMENTS" else None,
        node_order=(lambda node: node.node_id) if ordered else None,
    )


@pytest.mark.parametrize(
    ("strategy", "per_node", "ordered", "found", "steps"),
    [
        ("STRICT_PACK", 3, True, 18, 14_269),
        ("STRICT_PACK", 3, False, 18, 842),
        ("STRICT_SPREAD", 2, True, 15, 2_102),
        ("STRICT_SPREAD", 2, False, 15, 667),
        ("PACK", 2, True, 18, 3_113),
        ("PACK", 2, False, 18, 407),
        ("SPREAD", 2, True, 21, 3_553),
        ("SPREAD", 2, False, 21, 966),
        ("DISTINCT", 1, True, 19, 53),
        ("SEGMENTS", 2, True, 10, 1_758),
        ("SEGMENTS", 2, False, 10, 315),
    ],
)
def test_a_way_is_found_or_ruled_out_in_so_many_steps(strategy, per_node, ordered, found, steps):
    chance, effort, outcomes = random.Random(strategy), Counted(), []
    for _ in range(40):
        nodes, request = tight(chance, strategy, per_node, ordered=ordered)
        outcomes.append(lay_parts(nodes, [one.free for one in nodes], request, effort) is not None)
    assert outcomes.count(True) == found
    assert effort.spent <= steps
