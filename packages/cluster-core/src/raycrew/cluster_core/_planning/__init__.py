"""Which node takes which bundles: what is asked for, checked, and a pure search for where it goes."""

from raycrew.cluster_core._planning.bundle_spec import BundleSpec, spread_specs
from raycrew.cluster_core._planning.explanation import explain_request, split_evenly
from raycrew.cluster_core._planning.ordering import NodeOrder
from raycrew.cluster_core._planning.plan import PlacementPlan, plan_cluster
from raycrew.cluster_core._planning.request import (
    STRATEGIES,
    Amounts,
    PlacementRequest,
    check_counts,
    check_strategy,
)
from raycrew.cluster_core._planning.topology import (
    BOOKKEEPING,
    DOMAIN_LABEL,
    RESOURCE_STEP,
    RESOURCES_WITH_DEVICES,
    Bundle,
    NodeState,
    Placement,
    Process,
    Rendezvous,
)

__all__ = [
    "BOOKKEEPING",
    "DOMAIN_LABEL",
    "RESOURCES_WITH_DEVICES",
    "RESOURCE_STEP",
    "STRATEGIES",
    "Amounts",
    "Bundle",
    "BundleSpec",
    "NodeOrder",
    "NodeState",
    "Placement",
    "PlacementPlan",
    "PlacementRequest",
    "Process",
    "Rendezvous",
    "check_counts",
    "check_strategy",
    "explain_request",
    "plan_cluster",
    "split_evenly",
    "spread_specs",
]
