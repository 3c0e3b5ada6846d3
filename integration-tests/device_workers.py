"""A trainer and generators whose weights are on a device."""

import os

import torch

from raycrew.tensor_transport import RouteStore, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.testing import take_device
from raycrew.worker_groups import current_worker


class OnDevice:
    def __init__(self, directory, device, over_nccl, devices):
        self.device = torch.device(device)
        if over_nccl:
            take_device(self.route_rank(), 3, devices)
        self.store = RouteStore()
        self.prepare(directory)

    def join_route(self, told):
        return self.store.join(told)

    def explain(self):
        return self.store.explain()

    def pid(self):
        return os.getpid()


class Trainer(OnDevice):
    def route_rank(self):
        return 0

    def prepare(self, directory):
        self.publisher = WeightPublisher(self.store, directory=directory, bucket_bytes=1 << 20)
        self.seed = 0

    def learn(self, seed):
        self.seed = seed

    def publish_weights(self):
        return self.publisher.publish(weights(self.seed, self.device))


class Generator(OnDevice):
    def route_rank(self):
        return 1 + current_worker().rank

    def prepare(self, directory):
        self.weights, self.raises = {}, False
        self.receiver = WeightReceiver(self.load, store=self.store, directory=directory, rollback="shadow")

    def arm(self):
        self.raises = True

    def load(self, tensors):
        for i, (name, tensor) in enumerate(tensors):
            if self.raises and i == 2:
                self.raises = False
                raise RuntimeError("the engine has no room")
            assert tensor.device.type == (self.device.type if self.store.key else "cpu")
            self.weights[name] = tensor.to(self.device, copy=True)

    def prepare_weights(self, version):
        return self.receiver.prepare(version)

    def apply_weights(self, version):
        return self.receiver.apply(version)

    def catch_up(self):
        return self.receiver.pull().version

    def holds(self, seed):
        wanted = weights(seed, self.device)
        assert self.weights.keys() == wanted.keys()
        return all(torch.equal(self.weights[name], wanted[name]) for name in wanted)


def weights(seed, device):
    """Made on the CPU, so that all devices have the same."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"embed": (3000, 500), "head": (7, 11), "scale": (), "norm": (500,)}
    return {name: torch.randn(shape, generator=made).to(device) for name, shape in shapes.items()}
