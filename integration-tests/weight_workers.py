"""A trainer whose ranks hold shards of a model, and generators that serve the whole of it."""

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver, digest_weights
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport
from raycrew.worker_groups import CurrentWorker, current_worker


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))


def store(kind):
    return SharedMemoryTransport(arena_bytes=1 << 16) if kind == "shared_memory" else None


class Trainer:
    """Publishes its shards, each rank its own."""

    def __init__(self, directory: WeightDirectory, kind: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="env://")
        self.model = model()
        self.whole = model()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        rank, world = dist.get_rank(), dist.get_world_size()
        options = {"bucket_bytes": 256, "part": rank, "parts": world, "sharded": True}
        self.publisher = WeightPublisher(store(kind), directory=directory, **options)
        self.dies = False

    def step(self) -> None:
        """What an optimiser does, without learning anything."""
        with torch.no_grad():
            for sharded, whole in zip(self.model.parameters(), self.whole.parameters(), strict=True):
                sharded.to_local().add_(0.25)
                whole.add_(0.25)

    def arm(self, rank: int) -> None:
        self.dies = current_worker().rank == rank

    def publish_weights(self):
        return self.publisher.publish(self.weights() if self.dies else self.model.state_dict())

    def weights(self):
        for i, item in enumerate(self.model.state_dict().items()):
            if i == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    def output(self) -> torch.Tensor:
        return self.whole(torch.ones(2, 7)).detach()

    def digest(self) -> str:
        return digest_weights(self.whole.state_dict())


class Generator:
    """Serves what it was given last."""

    def __init__(self, directory: WeightDirectory, kind: str) -> None:
        torch.set_num_threads(1)
        self.model = model()
        self.receiver = WeightReceiver(
            self.load,
            expected=self.model.state_dict(),
            store=store(kind),
            directory=directory,
            rollback="shadow",
        )
        self.fault = ""
        self.paused = False

    def load(self, tensors) -> None:
        state = self.model.state_dict()
        for i, (name, tensor) in enumerate(tensors):
            if i == 2 and self.fault:
                self.fail()
            state[name].copy_(tensor)

    def fail(self) -> None:
        fault, self.fault = self.fault, ""
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the engine has no room")

    def arm(self, fault: str) -> None:
        self.fault = fault

    def prepare_weights(self, version: int):
        return self.receiver.prepare(version)

    def apply_weights(self, version: int):
        return self.receiver.apply(version)

    def catch_up(self) -> int:
        return self.receiver.pull().version

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def generate(self) -> tuple[bool, list[int], torch.Tensor]:
        output = self.model(torch.ones(2, 7)).detach()
        return self.paused, self.receiver.tag(len(output)).tolist(), output

    def digest(self) -> str:
        return digest_weights(self.model.state_dict())


class Follower:
    """Serves weights of a version that is required; it may follow by itself after a restart."""

    def __init__(self, directory: WeightDirectory, follows: bool) -> None:
        self.follows = follows
        self.weights = {"scale": torch.zeros(3), "bias": torch.zeros(2)}
        name = f"generator {current_worker().rank}"
        self.receiver = WeightReceiver(self.load, directory=directory, name=name)

    def on_generation(self, worker: CurrentWorker) -> None:
        if self.follows and worker.generation > 0:
            self.receiver.pull(missing_ok=True)

    def load(self, tensors) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in tensors}

    def prepare_weights(self, version: int):
        return self.receiver.prepare(version)

    def apply_weights(self, version: int):
        return self.receiver.apply(version)

    def generate(self, version: int) -> tuple[int, list[float]]:
        served = self.receiver.require(version)
        return served, torch.cat([self.weights["scale"], self.weights["bias"]]).tolist()

    def pid(self) -> int:
        return os.getpid()
