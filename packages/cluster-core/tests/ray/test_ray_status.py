"""Reports of autoscalers: those that launch nodes, and those that only watch."""

import pytest

from raycrew.cluster_core._ray.status import launches_nodes

pytestmark = pytest.mark.smoke

NODE = "3f" * 28


@pytest.mark.parametrize(
    ("summary", "launches"),
    [
        (None, None),
        ({}, None),
        ({"node_type_mapping": {}, "pending_launches": {}}, None),
        ({"node_type_mapping": {NODE: f"node_{NODE}"}}, False),
        ({"node_type_mapping": {NODE: "ray.head.default"}}, True),
        ({"node_type_mapping": {NODE: f"node_{NODE}"}, "pending_launches": {"worker": 2}}, True),
    ],
)
def test_an_autoscaler_that_only_watches_makes_types_up(summary, launches):
    assert launches_nodes({"autoscaler_report": summary}) is launches
