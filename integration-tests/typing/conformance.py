"""Each class is assigned to each Protocol that it fits: read by the type checker, never run."""

from typing import Any

from raycrew.cluster_core import Claim, Cluster, Occupant, RayConnection, RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster
from raycrew.tensor_transport import (
    BatchedDataDict,
    PeerGroup,
    RTensor,
    TensorArguments,
    WeightReceiver,
    WeightSyncReport,
)
from raycrew.tensor_transport.integrations.vllm import VllmWeights
from raycrew.venv_manager import NodeRunner, RegistryEnvironmentProvider
from raycrew.worker_groups import (
    ArgumentTransport,
    EnvironmentProvider,
    MultiWorkerFuture,
    RayWorkerGroup,
    RowBatch,
    RowHandles,
    Shardable,
    TimedReport,
    WeightVersions,
)
from raycrew.worker_groups.protocols import NodeRunner as WorkerGroupsNodeRunner


def clusters(real: RayVirtualCluster, fake: FakeCluster) -> tuple[Cluster, ...]:
    return real, fake


def claims(cluster: RayVirtualCluster) -> Claim:
    return cluster.claim(None, "holder")


def occupants(group: RayWorkerGroup) -> Occupant:
    return group


def environment_providers(registry: RegistryEnvironmentProvider) -> EnvironmentProvider:
    return registry


def argument_transports(tensors: TensorArguments) -> ArgumentTransport:
    return tensors


def shardables(batch: BatchedDataDict[Any]) -> tuple[Shardable, Shardable]:
    return batch, batch.shard_by_batch_size(2)


def row_batches(batch: BatchedDataDict[Any]) -> RowBatch:
    return batch


def row_handles(handle: RTensor) -> RowHandles:
    return handle


def weight_versions(receiver: WeightReceiver, engine: VllmWeights) -> tuple[WeightVersions, ...]:
    return receiver, engine


def timed_reports(report: WeightSyncReport) -> TimedReport:
    return report


def peer_groups(group: RayWorkerGroup) -> PeerGroup:
    return group


def node_runners(cluster: RayVirtualCluster, connection: RayConnection) -> tuple[NodeRunner, ...]:
    return cluster, connection


def providers_take_clusters(provider: RegistryEnvironmentProvider, cluster: Cluster) -> str | None:
    runner: WorkerGroupsNodeRunner = cluster
    return provider.python_for("package.module.Class", runner)


def futures_are_lists_of_references(future: MultiWorkerFuture[Any]) -> list[Any]:
    return future
