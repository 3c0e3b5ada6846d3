"""Weight updates that stream: overlap, one fetch per node, memory, and the way over files."""

import os
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
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
TIMEOUT_S = 300.0


def many(size_bytes: int, version: int = 0) -> dict[str, torch.Tensor]:
    """1,000 tensors."""
    rows = size_bytes // 1000 // 2048
    return {f"layer.{i}": torch.full((rows, 1024), float(version + i)).bfloat16() for i in range(1000)}


class Publishing:
    """Publishes into shared memory of the node, or into a file."""

    def __init__(self, directory: WeightDirectory, session: str, size_bytes: int, checksums: bool) -> None:
        torch.set_num_threads(1)
        self.weights = many(size_bytes)
        store = SharedMemoryTransport(session, arena_bytes=BUCKET)
        self.publisher = WeightPublisher(
            store, directory=directory, bucket_bytes=BUCKET, checksums=checksums, timeout_s=TIMEOUT_S
        )

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

    def save(self, path: str, written_out: bool) -> None:
        """As others save; written out to its disk, nothing of it stays in memory."""
        save_file(self.weights, path)
        if written_out:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Receiving:
    """Loads into its own tensors, or only fetches."""

    def __init__(self, directory: WeightDirectory, session: str, size_bytes: int) -> None:
        torch.set_num_threads(1)
        self.weights = {name: torch.zeros_like(t) for name, t in many(size_bytes).items()}
        self.directory = directory
        self.store = SharedMemoryTransport(session, arena_bytes=BUCKET)
        self.receiver = self.another()
        self.source, self.target = (np.ones(64 * MIB, np.uint8) for _ in range(2))

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

    def fetch(self, version: int) -> float:
        """Have all buckets in place, and no more; the seconds of a processor that it took."""
        began, before = time.process_time(), own_memory()
        options = {"store": self.store, "directory": self.directory, "borrow": True, "verify": False}
        with WeightReceiver(self.load, **options) as fresh:
            size = fresh.prepare(version, timeout_s=TIMEOUT_S).size_bytes
            copied = own_memory() - before
        if size < sum(t.nbytes for t in self.weights.values()) or copied > BUCKET:
            raise RuntimeError(f"of {size} bytes, which are to be mapped, {copied} were copied")
        return time.process_time() - began

    def compute(self, seconds_of_cpu: float) -> None:
        """Take so much of a processor, and no memory."""
        until = time.process_time() + seconds_of_cpu
        while time.process_time() < until:
            pass

    def copy(self, size_bytes: int) -> None:
        """Copy so many bytes of this process, by one thread."""
        for _ in range(size_bytes // self.source.nbytes):
            np.copyto(self.target, self.source)

    def take(self, path: str) -> None:
        self.load(load_file(path).items())


class Crew:
    """One publishing process and four receivers on one node."""

    def __init__(self, peers: Any, size_bytes: int, *, checksums: bool = True) -> None:
        self.size_bytes, self.session = size_bytes, uuid.uuid4().hex[:12]
        self.directory = WeightDirectory.start(keep=KEEP)
        arguments = (self.directory, self.session, size_bytes)
        self.trainer = peers([ray.remote(Publishing).options(num_cpus=0).remote(*arguments, checksums)])
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

    def updated(self, count: int) -> float:
        """From the start of an update until so many receivers have all of it, as it is published."""
        group, following = self.generators.on(ranks=range(count)), (self.directory.latest or 0) + 1
        start = time.perf_counter()
        fetching = group.call("fetch", following)
        publishing = self.trainer.call("publish_weights")
        fetching.get_results(timeout=TIMEOUT_S)
        taken = time.perf_counter() - start
        (update,) = publishing.get_results(timeout=TIMEOUT_S)
        if update.version != following:
            raise RuntimeError(f"version {update.version} was published in place of {following}")
        return taken

    def fetched_by(self, count: int) -> float:
        return self.at_once(count, "fetch", self.directory.latest)

    def cpu_of_a_fetch(self) -> float:
        (taken,) = self.one.call("fetch", self.directory.latest).get_results()
        return float(taken)

    def loaded_by(self, count: int) -> float:
        """Fetched and copied into as many models of their own."""
        group = self.generators.on(ranks=range(count))
        return float(max(group.call("pull_again").get_results()))

    def at_once(self, count: int, method: str, *args: Any) -> float:
        """So many receivers do the same."""
        group = self.generators.on(ranks=range(count))
        return seconds(lambda: group.call(method, *args).get_results(timeout=TIMEOUT_S))

    def over_a_file(self, directory: str, written_out: bool) -> float:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = str(Path(folder, "model.safetensors"))
            start = time.perf_counter()
            self.trainer.call("save", path, written_out).get_results()
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


def unchecked(peers: Any, size_bytes: int, repeat: int) -> list[Figure]:
    """Without checksums: what a user waits for whose receivers share a node, and against files, as bare."""
    title = titled(size_bytes)
    crew = Crew(peers, size_bytes, checksums=False)
    try:
        return [
            ratio(
                f"{title}: from the start of an update until four receivers have it, over one",
                lambda: crew.updated(4),
                lambda: crew.updated(1),
                baseline="one receiver; each maps what is published as it comes; without checksums, "
                "not loaded",
                goal=1.4,
                repeat=8 * repeat,
                warmup=KEEP + 1,
            ),
            over_file(
                crew, f"{title}, without checksums", repeat, "in memory", "; it has no checksums, either"
            ),
        ]
    finally:
        crew.close()


def by_four(crew: Crew, title: str, repeat: int) -> list[Figure]:
    """Four receivers against one, and what four processes cost each other on this machine anyway."""
    cpu_s = min(crew.cpu_of_a_fetch() for _ in range(1 + repeat))
    floor = f"one of them; {os.cpu_count()} cores: four that fetch can hardly be below"
    return [
        ratio(
            f"{title}: fetch by four receivers over one",
            lambda: crew.fetched_by(4),
            lambda: crew.fetched_by(1),
            baseline="one receiver of a version that stands: mapped, without checksums, not loaded; all of "
            "it is work of each one's processor, whose floor is the next figure",
            repeat=4 * repeat,
        ),
        ratio(
            "four processes that compute as long as a fetch does, over one",
            lambda: crew.at_once(4, "compute", cpu_s),
            lambda: crew.at_once(1, "compute", cpu_s),
            baseline=floor,
            repeat=4 * repeat,
            note=f"{1e3 * cpu_s:.0f} ms of a processor each",
        ),
        ratio(
            f"{title}: loaded by four into a model of each, over one",
            lambda: crew.loaded_by(4),
            lambda: crew.loaded_by(1),
            baseline="one receiver; each copies into private memory",
            repeat=repeat,
        ),
        ratio(
            "four processes that copy as many bytes over one",
            lambda: crew.at_once(4, "copy", crew.size_bytes),
            lambda: crew.at_once(1, "copy", crew.size_bytes),
            baseline=floor.replace("fetch", "load"),
            repeat=repeat,
        ),
    ]


WHERE = {
    "in memory": ("/dev/shm", False, ", which is memory of the same node"),
    "on disk": ("/var/tmp", True, ", written out (fsync) and read back"),
}


def over_file(crew: Crew, title: str, repeat: int, where: str, note: str = "") -> Figure:
    """Against a file of safetensors: one that never leaves memory, or one that does, as a checkpoint."""
    directory, written_out, how = WHERE[where]
    return ratio(
        f"{title}: speed over safetensors {where}",
        crew.streamed,
        lambda: crew.over_a_file(directory, written_out),
        baseline=f"save_file and load_file in {directory}{how}{note}",
        goal=3.0,
        better="higher",
        repeat=3 * repeat,
        invert=True,
    )


def titled(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB in 1,000 tensors"


def streaming(peers: Any, size: int, repeat: int) -> list[Figure]:
    """Updates with checksums, and what they take beside other ways."""
    crew, title = Crew(peers, size), titled(size)
    try:
        (peak,) = crew.trainer.call("peak").get_results()
        for _ in range(KEEP):
            crew.streamed()
        figures = [
            ratio(
                f"{title}, streamed: time over the slower side",
                crew.streamed,
                crew.apart,
                baseline="the slower of (gather + put) and (fetch + load), both running",
                goal=1.2,
                repeat=repeat,
            ),
            *by_four(crew, title, repeat),
            *(over_file(crew, title, repeat, where) for where in WHERE),
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
    size, repeat = (128 * MIB, 2) if quick else (1024 * MIB, 5)
    with own_ray(512):  # One crew after another: each has ten models.
        return [*streaming(Peers, size, repeat), *unchecked(Peers, size, repeat)]
