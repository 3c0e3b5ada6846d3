"""Weight updates that stream: overlap, one fetch per node, memory, and the way over files."""

import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file

from bench_weights import Peers
from harness import Figure, figure, ratio, seconds
from own_ray import own_ray
from raycrew.tensor_transport import (
    SharedMemoryBackend,
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    sync_weights,
)
from raycrew.tensor_transport.testing._transports import own_memory
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport

MIB = 1 << 20
BUCKET = 16 * MIB
KEEP = 2


def many(size_bytes: int, version: int = 0) -> dict[str, torch.Tensor]:
    """1,000 tensors."""
    rows = size_bytes // 1000 // 2048
    return {f"layer.{i}": torch.full((rows, 1024), float(version + i)).bfloat16() for i in range(1000)}


class Publishing:
    """Publishes into shared memory of the node, or into a file."""

    def __init__(self, directory: WeightDirectory, session: str, size_bytes: int) -> None:
        torch.set_num_threads(1)
        self.weights = many(size_bytes)
        store = SharedMemoryTransport(session, arena_bytes=BUCKET)
        self.publisher = WeightPublisher(store, directory=directory, bucket_bytes=BUCKET)

    def publish_weights(self) -> Any:
        return self.publisher.publish(self.weights)

    def timed(self) -> float:
        return seconds(self.publish_weights)

    def peak(self) -> float:
        """How much memory of its own publishing takes beside the weights, in buckets."""
        before, found, done = own_memory(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                found.append(own_memory())

        thread = threading.Thread(target=watch)
        thread.start()
        self.publish_weights()
        done.set()
        thread.join()
        return (max(found) - before) / BUCKET

    def save(self, path: str) -> None:
        save_file(self.weights, path)


class Receiving:
    """Loads into its own tensors, or only fetches."""

    def __init__(self, directory: WeightDirectory, session: str, size_bytes: int) -> None:
        torch.set_num_threads(1)
        self.weights = {name: torch.zeros_like(t) for name, t in many(size_bytes).items()}
        self.directory = directory
        self.store = SharedMemoryTransport(session, arena_bytes=BUCKET)
        self.receiver = self.another()

    def another(self) -> WeightReceiver:
        return WeightReceiver(
            self.load, expected=self.weights, store=self.store, borrow=True, directory=self.directory
        )

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)

    def apply_weights(self, version: int) -> Any:
        return self.receiver.apply(version)

    def pull_again(self) -> float:
        """What a receiver takes that holds nothing yet."""
        with self.another() as fresh:
            return seconds(fresh.pull)

    def fetch(self, version: int) -> None:
        """Have all buckets in place, and no more."""
        options = {"store": self.store, "directory": self.directory, "borrow": True, "verify": False}
        with WeightReceiver(self.load, **options) as fresh:
            fresh.prepare(version)

    def take(self, path: str) -> None:
        self.load(load_file(path).items())


class Crew:
    """One publishing process and four receivers on one node."""

    def __init__(self, peers: Any, size_bytes: int) -> None:
        self.size_bytes, self.session = size_bytes, uuid.uuid4().hex[:12]
        self.directory = WeightDirectory.start(keep=KEEP)
        arguments = (self.directory, self.session, size_bytes)
        self.trainer = peers([ray.remote(Publishing).options(num_cpus=0).remote(*arguments)])
        self.generators = peers(
            [ray.remote(Receiving).options(num_cpus=0).remote(*arguments) for _ in range(4)]
        )
        self.one = self.generators.on(ranks=[0])
        self.watch = SharedMemoryBackend(self.session)

    def streamed(self) -> float:
        return seconds(lambda: sync_weights(self.trainer, self.one, directory=self.directory))

    def apart(self) -> float:
        """The slower of publishing and of fetching what was there before, at the same time."""
        pulling = self.one.call("pull_again")
        publishing = self.trainer.call("timed")
        return float(max(pulling.get_results() + publishing.get_results()))

    def fetched_by(self, count: int) -> float:
        version = self.directory.latest
        group = self.generators.on(ranks=range(count))
        return seconds(lambda: group.call("fetch", version).get_results())

    def loaded_by(self, count: int) -> float:
        """Fetched and copied into as many models of their own."""
        group = self.generators.on(ranks=range(count))
        return float(max(group.call("pull_again").get_results()))

    def over_a_file(self) -> float:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = str(Path(folder, "model.safetensors"))
            start = time.perf_counter()
            self.trainer.call("save", path).get_results()
            self.one.call("take", path).get_results()
            return time.perf_counter() - start

    def held(self) -> float:
        """Bytes in the store, in models."""
        return self.watch.stats().held_bytes / self.size_bytes

    def peak_and_after(self) -> tuple[float, float]:
        samples, done = [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                samples.append(self.held())

        thread = threading.Thread(target=watch)
        thread.start()
        self.streamed()
        done.set()
        thread.join()
        return max(samples), self.held()

    def close(self) -> None:
        for actor in self.trainer.actors + self.generators.actors:
            ray.kill(actor)
        self.directory.close()
        self.watch.close()


def streaming(peers: Any, quick: bool) -> list[Figure]:
    """All figures."""
    size = (128 if quick else 1024) * MIB
    repeat = 2 if quick else 5
    crew = Crew(peers, size)
    try:
        (peak,) = crew.trainer.call("peak").get_results()
        for _ in range(KEEP):
            crew.streamed()
        title = f"{size // MIB} MiB in 1,000 tensors"
        figures = [
            ratio(
                f"{title}, streamed: time over the slower side",
                crew.streamed,
                crew.apart,
                baseline="the slower of (gather + put) and (fetch + load), both running",
                goal=1.2,
                repeat=repeat,
            ),
            ratio(
                f"{title}: fetch by four receivers over one",
                lambda: crew.fetched_by(4),
                lambda: crew.fetched_by(1),
                baseline="one receiver of the same node; mapped, without checksums, not loaded",
                goal=1.4,
                repeat=repeat,
            ),
            ratio(
                "the same, loaded into a model of each",
                lambda: crew.loaded_by(4),
                lambda: crew.loaded_by(1),
                baseline="one receiver; each copies into private memory",
                repeat=repeat,
            ),
            ratio(
                f"{title}: speed over safetensors",
                crew.streamed,
                crew.over_a_file,
                baseline="save_file and load_file in memory of the same node",
                goal=3.0,
                better="higher",
                repeat=repeat,
                invert=True,
            ),
        ]
        peaks, afters = zip(*(crew.peak_and_after() for _ in range(repeat)), strict=True)
        bound = KEEP + 1 + 2 * BUCKET / size
        baseline = f"the bytes of one model; keep={KEEP}"
        figures += [
            figure("store during an update", list(peaks), unit="models", baseline=baseline, goal=bound),
            figure("store after an update", list(afters), unit="models", baseline=baseline, goal=KEEP + 0.01),
            figure(
                "publisher, beside its weights",
                [peak],
                unit="buckets",
                baseline="a bucket of 16 MiB; its first update, with all that the process loads for it",
                goal=2.5,
            ),
        ]
        return figures
    finally:
        crew.close()


def run(quick: bool) -> list[Figure]:
    with own_ray(512):
        return streaming(Peers, quick)
