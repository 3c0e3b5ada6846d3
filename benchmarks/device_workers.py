"""The workers of the suite `gpu`: a model on the device of each."""

import time
from typing import Any

import torch

from raycrew.tensor_transport import RouteStore, WeightDirectory, WeightPublisher, WeightReceiver

TENSORS = 400
_ELEMENTS = 2_500_000
MODEL_BYTES = 2 * TENSORS * _ELEMENTS


def _model(value: float) -> dict[str, torch.Tensor]:
    how = {"dtype": torch.bfloat16, "device": "cuda"}
    return {f"layer {i}": torch.full((_ELEMENTS,), value * (i % 5), **how) for i in range(TENSORS)}


class _Holder:
    """Has a model, and a place on a route."""

    def __init__(self, value: float) -> None:
        self.store, self.weights = RouteStore(), _model(value)

    def join_route(self, told: Any) -> Any:
        return self.store.join(told)

    def sums(self) -> list[float]:
        return [float(tensor.float().sum()) for tensor in self.weights.values()]


class DeviceTrainer(_Holder):
    """Publishes its model."""

    def __init__(self, directory: WeightDirectory) -> None:
        super().__init__(1.0)
        self.publisher = WeightPublisher(self.store, directory=directory)
        self.other = _model(0.0)

    def publish_weights(self) -> Any:
        return self.publisher.publish(self.weights)

    def copy(self) -> float:
        """Seconds of copies of all tensors."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for name, tensor in self.weights.items():
            self.other[name].copy_(tensor)
        torch.cuda.synchronize()
        return time.perf_counter() - start


class DeviceGenerator(_Holder):
    """Loads what is published into its own model."""

    def __init__(self, directory: WeightDirectory) -> None:
        super().__init__(0.0)
        self.receiver = WeightReceiver(self.load, store=self.store, directory=directory)

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)

    def prepare_weights(self, version: int) -> Any:
        return self.receiver.prepare(version)

    def apply_weights(self, version: int) -> Any:
        return self.receiver.apply(version)
