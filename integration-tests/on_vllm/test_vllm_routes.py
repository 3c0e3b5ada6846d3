"""Weights from one process into an engine of another one, over each kind of route."""

import contextlib

import pytest
import torch
from vllm_engines import Trainer, references

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import RouteStore, WeightDirectory, WeightRoute, sync_weights
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.worker_groups import RayWorkerGroup

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KIND = "tied embeddings, biases"


class Joining(Trainer):
    """A trainer of this process, whose model may be on a device."""

    def __init__(self, directory, device):
        self.store, self.device, self.seed = RouteStore(), device, 0
        super().__init__(KIND, self.store, directory)

    def join_route(self, told):
        return self.store.join(told)

    def publish_weights(self):
        self.seed += 1
        update = self.publish(self.seed, device=self.device)
        self.references = references(self.model)
        return update

    def close(self):
        super().close()
        self.store.close()


def check_routes(transports, device, tolerance=1e-4):
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([1], use_gpus=device == "cuda") as cluster,
        RayWorkerGroup(cluster, "vllm_routed.Engine", kind=KIND, directory=directory) as engines,
        contextlib.closing(Joining(directory, device)) as trainer,
    ):
        for transport in transports:
            with WeightRoute(transport, device=device) as route:
                for prepare in ("prepare_weights", None):
                    how = {"directory": directory, "route": route, "prepare": prepare}
                    sync_weights(LocalPeers([trainer]), engines, timeout_s=120, **how)
                    engines.call("check", trainer.references, tolerance=tolerance).get_results()
                assert route.choice.name == transport
                assert engines.call("explain_route").get_results() == [route.explain()]


def test_an_engine_computes_what_the_trainer_does_whatever_way_its_weights_came(local_ray):
    check_routes(["shared_memory", "gloo", "object_store", "tcp"], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "devices"), [("cuda_ipc", 1), ("nccl", 2)])
def test_also_from_device_to_device(local_ray, transport, devices):
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    torch.cuda.set_device(devices - 1)  # the engine has the first one
    check_routes([transport], "cuda", tolerance=1e-3)
