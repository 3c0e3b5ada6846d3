"""Membership of a cluster: found or started, configured, authenticated, and what travels to workers."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._connection.config import ClusterConfig
from raycrew.cluster_core._connection.environment import DEFAULT_POLICY, EnvironmentPolicy, Secrets
from raycrew.cluster_core._connection.files import ENV_FILE, Layers, layers_of
from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._connection.addresses import check_reachable
    from raycrew.cluster_core._connection.connection import RayConnection
    from raycrew.cluster_core._connection.init import init_ray
    from raycrew.cluster_core._connection.target import Target, target_of
    from raycrew.cluster_core._connection.token import default_token_file
    from raycrew.cluster_core._connection.visiting import connection_advice, prepare_visit, present_token

__all__ = [
    "DEFAULT_POLICY",
    "ENV_FILE",
    "ClusterConfig",
    "EnvironmentPolicy",
    "Layers",
    "RayConnection",
    "Secrets",
    "Target",
    "check_reachable",
    "connection_advice",
    "default_token_file",
    "init_ray",
    "layers_of",
    "prepare_visit",
    "present_token",
    "target_of",
]

__getattr__ = lazy(
    __name__,
    {
        "addresses": ["check_reachable"],
        "connection": ["RayConnection"],
        "init": ["init_ray"],
        "target": ["Target", "target_of"],
        "token": ["default_token_file"],
        "visiting": ["connection_advice", "prepare_visit", "present_token"],
    },
)
