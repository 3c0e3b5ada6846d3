"""Weight updates against the naive ways, between actors of one node, in the same run."""

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch

from harness import Figure, figure, ratio, seconds
from own_ray import own_ray
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver, sync_weights
from raycrew.tensor_transport.testing import InProcessByteStore

MIB = 1 << 20


def model(size_bytes: int, version: int = 0) -> dict[str, torch.Tensor]:
    """Layers as a small transformer has them: a few large tensors, many small ones, one of them tied."""
    layers = max(1, size_bytes // (5 * 4 * MIB))
    found: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for part in ("q", "k", "v", "o", "mlp"):
            found[f"layers.{layer}.{part}.weight"] = torch.full((1024, 2048), version + layer).bfloat16()
            found[f"layers.{layer}.{part}.bias"] = torch.full((2048,), version + layer).bfloat16()
    found["head.weight"] = found["layers.0.q.weight"]
    return found


class Trainer:
    """Has weights, and publishes them the ways that are compared."""

    def __init__(self, size_bytes: int) -> None:
        self.weights = model(size_bytes)
        self.publisher = WeightPublisher()

    def publish_weights(self) -> Any:
        return self.publisher.publish(self.weights)

    def as_state_dict(self) -> Any:
        return self.weights

    def as_bytes(self) -> bytes:
        stream = io.BytesIO()
        torch.save(self.weights, stream)
        return stream.getvalue()


class Generator:
    """Copies weights into its own."""

    def __init__(self, size_bytes: int) -> None:
        self.weights = {name: torch.zeros_like(t) for name, t in model(size_bytes).items()}
        self.receiver = WeightReceiver(self.load, expected=self.weights, borrow=True)

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)

    def apply_weights(self, update: Any) -> Any:
        return self.receiver.apply(update)

    def take_state_dict(self, weights: dict[str, torch.Tensor]) -> None:
        self.load(weights.items())

    def take_bytes(self, data: bytes) -> None:
        self.load(torch.load(io.BytesIO(data)).items())

    def sum_and_clear(self) -> float:
        found = float(sum(t.double().sum() for t in self.weights.values()))
        for tensor in self.weights.values():
            tensor.zero_()
        return found


class Results(list):
    """Fits `PeerResults`."""

    def get_results(self, *, timeout: float | None = None) -> list[Any]:
        return ray.get(list(self), timeout=timeout)


class Peers:
    """Fits `PeerGroup`, over plain actors."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors
        self.ranks = list(range(len(actors)))

    def call(self, method: str, *args: Any) -> Results:
        return Results([getattr(actor, method).remote(*args) for actor in self.actors])

    def on(self, *, ranks: list[int]) -> "Peers":
        return Peers([self.actors[rank] for rank in ranks])


def between_actors(quick: bool) -> list[Figure]:
    size = (64 if quick else 512) * MIB
    trainer = Peers([ray.remote(Trainer).options(num_cpus=0).remote(size)])
    generators = Peers([ray.remote(Generator).options(num_cpus=0).remote(size) for _ in range(2)])
    want = float(sum(t.double().sum() for t in model(size).values()))
    splits: dict[str, list[float]] = {"gather_s": [], "wire_s": [], "load_s": [], "pause_s": []}

    def checked(act: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            taken = seconds(act)
            found = generators.call("sum_and_clear").get_results()
            if found != [want] * len(found):
                raise RuntimeError(f"weights arrived wrong: {found}, expected {want}")
            return taken

        return run

    def ours() -> None:
        report = sync_weights(trainer, generators)
        for name, samples in splits.items():
            samples.append(1e3 * getattr(report, name))

    def by_argument() -> None:
        generators.call("take_state_dict", *trainer.call("as_state_dict")).get_results()

    def by_bytes() -> None:
        generators.call("take_bytes", *trainer.call("as_bytes")).get_results()

    repeat = 2 if quick else 5
    figures = [
        ratio(
            f"{size // MIB} MiB to 2 generators: speed over {name}",
            checked(ours),
            checked(naive),
            baseline=baseline,
            better="higher",
            repeat=repeat,
            invert=True,
        )
        for name, naive, baseline in (
            ("a state dict", by_argument, "a state dict as result and argument"),
            ("torch.save", by_bytes, "torch.save bytes as result and argument"),
        )
    ]
    for name, samples in splits.items():
        part = name.removesuffix("_s")
        figures.append(figure(f"the same: {part}", samples, unit="ms", baseline="the slowest rank"))
    for actor in trainer.actors + generators.actors:
        ray.kill(actor)
    return figures


def answers(quick: bool) -> list[Figure]:
    """What is asked of a directory of this machine goes over a socket, in place of through Ray."""
    count = 20 if quick else 200
    with WeightDirectory.start() as directory:
        actor = directory._edge._actor  # type: ignore[attr-defined]  # noqa: SLF001

        def over_a_socket() -> None:
            for _ in range(count):
                directory.latest  # noqa: B018

        def through_ray() -> None:
            for _ in range(count):
                ray.get(actor.ask.remote("newest", ()))

        for ask in (over_a_socket, through_ray):
            ask()
        return [
            ratio(
                "an answer of a directory on this machine: speed over a call of its actor",
                lambda: seconds(over_a_socket),
                lambda: seconds(through_ray),
                baseline="the same question as a call of the actor that has the directory",
                goal=5.0,
                better="higher",
                repeat=3 if quick else 9,
                invert=True,
            )
        ]


def in_process(quick: bool) -> list[Figure]:
    """What packing, checksums and unpacking cost beside the copies that there are anyway."""
    weights = model((32 if quick else 128) * MIB)
    source = np.ones(sum(t.nbytes for t in weights.values()), np.uint8)
    target = np.ones_like(source)
    into = {name: torch.zeros_like(t) for name, t in weights.items()}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            into[name].copy_(tensor)

    store = InProcessByteStore()
    publisher, receiver = WeightPublisher(store), WeightReceiver(load, store=store, borrow=True)

    def ours() -> float:
        start = time.perf_counter()
        receiver.apply(publisher.publish(weights))
        return time.perf_counter() - start

    return [
        ratio(
            "publish and apply in one process: time over one copy",
            ours,
            lambda: seconds(lambda: np.copyto(target, source)),
            baseline="numpy copy of the same bytes; there are three copies and two checksums",
            repeat=3 if quick else 9,
        )
    ]


def run(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    figures = in_process(quick)
    with own_ray(512 if quick else 4096):
        return figures + between_actors(quick) + answers(quick)
