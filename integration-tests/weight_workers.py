"""A trainer whose ranks hold shards of a model, and generators whose ranks hold it split in other ways."""

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from raycrew.tensor_transport import (
    Layout,
    RouteStore,
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    digest_weights,
)
from raycrew.tensor_transport.weights.resharding import ShardLoader, replicated, sharded
from raycrew.worker_groups import CurrentWorker, current_worker


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))


def tensor_parallel(world):
    """The layout of the model over the ranks of a group: its first layer by columns, the second by rows."""
    ranks = range(world)
    return Layout(
        {
            "0.weight": sharded((33, 7), "float32", ranks),
            "0.bias": sharded((33,), "float32", ranks),
            "2.weight": sharded((5, 33), "float32", ranks, 1),
            "2.bias": replicated((5,), "float32", ranks),
        }
    )


class Trainer:
    """Publishes its shards, each rank its own."""

    def __init__(self, directory: WeightDirectory) -> None:
        torch.set_num_threads(1)
        worker = current_worker()
        options = {"bucket_bytes": 256, "part": worker.rank, "parts": worker.world_size, "sharded": True}
        self.store = RouteStore()
        self.publisher = WeightPublisher(self.store, directory=directory, **options)
        self.dies = False
        self.steps = 0

    def on_generation(self, worker: CurrentWorker) -> None:
        """Shard the model anew, as far as whoever is furthest has come."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="env://")
        steps = torch.tensor(self.steps)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        self.model, self.whole, self.steps = model(), model(), 0
        fully_shard(self.model, mesh=init_device_mesh("cpu", (worker.world_size,)))
        for _ in range(int(steps)):
            self.step()

    def join_route(self, told):
        return self.store.join(told)

    def explain(self) -> str:
        return self.store.explain()

    def step(self) -> None:
        """What an optimiser does, without learning anything."""
        self.steps += 1
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


class DyingStore(RouteStore):
    """Ends its process instead of taking a second bucket, if it is told to."""

    dies = False
    taken = 0

    def get_tensor(self, ticket, timeout_s=None):
        if self.dies and self.taken:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken += self.dies
        return super().get_tensor(ticket, timeout_s)


class Generator:
    """Serves its part of what it was given last."""

    def __init__(self, directory: WeightDirectory) -> None:
        torch.set_num_threads(1)
        worker = current_worker()
        self.rank, layout = worker.rank, tensor_parallel(worker.world_size)
        self.weights = {
            name: torch.zeros(share.memory.shape)
            for name, tensor in layout.tensors.items()
            for share in tensor.shares
            if share.rank == self.rank
        }
        self.loader = ShardLoader(self.weights, layout, self.rank)
        self.store = DyingStore()
        self.receiver = WeightReceiver(
            self.load,
            expected=self.loader.expected,
            store=self.store,
            directory=directory,
            rollback="shadow",
        )
        self.raises = False
        self.paused = False

    def join_route(self, told):
        return self.store.join(told)

    def explain(self) -> str:
        return self.store.explain()

    def load(self, tensors) -> None:
        self.loader(self.half_way(tensors) if self.raises else tensors)

    def half_way(self, tensors):
        for i, item in enumerate(tensors):
            if i == 2:
                self.raises = False
                raise RuntimeError("the engine has no room")
            yield item

    def arm(self, fault: str) -> None:
        self.raises, self.store.dies = fault == "raises", fault == "dies"

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
        """What this rank adds to the outputs of its group."""
        weights = self.weights
        hidden = torch.relu(torch.ones(2, 7) @ weights["0.weight"].T + weights["0.bias"])
        output = hidden @ weights["2.weight"].T + (weights["2.bias"] if self.rank == 0 else 0)
        return self.paused, self.receiver.tag(len(output)).tolist(), output

    def parts(self) -> dict[str, torch.Tensor]:
        return self.weights


class Follower:
    """Serves weights of a version that is required; it may follow by itself after a restart."""

    def __init__(self, directory: WeightDirectory, follows: bool) -> None:
        self.follows, self.dies = follows, False
        self.weights = {"scale": torch.zeros(3), "bias": torch.zeros(2)}
        name = f"generator {current_worker().rank}"
        self.receiver = WeightReceiver(self.load, directory=directory, name=name)

    def on_generation(self, worker: CurrentWorker) -> None:
        if self.follows and worker.generation > 0:
            self.receiver.pull(missing_ok=True)

    def arm(self) -> None:
        self.dies = True

    def load(self, tensors) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
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

    def leave(self) -> None:
        self.receiver.close()
