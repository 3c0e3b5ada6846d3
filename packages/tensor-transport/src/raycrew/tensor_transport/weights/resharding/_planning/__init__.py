"""Which region of which rank goes where: a pure function of two layouts."""

from raycrew.tensor_transport.weights.resharding._planning.agreement import check_targets
from raycrew.tensor_transport.weights.resharding._planning.plan import Move, ReshardPlan, plan_reshard

__all__ = [
    "Move",
    "ReshardPlan",
    "check_targets",
    "plan_reshard",
]
