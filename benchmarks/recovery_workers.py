"""The workers of the suite `recovery`; their processes import no more than they need."""

import os
import threading
import time
from typing import Any

import torch

from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.worker_groups import CurrentWorker, current_worker

SIZE = 1 << 20


class Idle:
    """Does next to nothing, or nothing for some time."""

    def pid(self) -> int:
        return os.getpid()

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def heart(self) -> tuple[int, list[int]]:
        """This process, and the thread that writes its heartbeat."""
        beats = [thread.native_id for thread in threading.enumerate() if thread.name == "raycrew-heart"]
        return os.getpid(), [one for one in beats if one is not None]


class Generator:
    """Follows a directory's versions; notes when it has got how far, in seconds since the epoch."""

    def __init__(self, directory: WeightDirectory) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.times = {"begun": time.time()}
        name = f"generator {current_worker().rank}"
        self.receiver = WeightReceiver(self.load, directory=directory, name=name)

    def on_generation(self, worker: CurrentWorker) -> None:
        if worker.generation:
            self.receiver.pull(missing_ok=True)
            self.times.setdefault("weights", time.time())

    def load(self, tensors: Any) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in tensors}

    def pid(self) -> int:
        return os.getpid()

    def prepare_weights(self, version: int) -> Any:
        return self.receiver.prepare(version)

    def apply_weights(self, version: int) -> Any:
        return self.receiver.apply(version)

    def generate(self, version: int, seconds: float) -> tuple[float, dict[str, float]]:
        """A sample, made of the weights of a version, and the times."""
        self.receiver.require(version)
        time.sleep(seconds)
        return float(self.weights["w"].sum()) / SIZE, {**self.times, "sample": time.time()}


class Trainer:
    """Publishes weights that are all the number of their version."""

    def __init__(self, directory: WeightDirectory) -> None:
        self.publisher, self.value = WeightPublisher(directory=directory), 0.0

    def publish_weights(self) -> Any:
        self.value += 1.0
        return self.publisher.publish({"w": torch.full((SIZE,), self.value)})
