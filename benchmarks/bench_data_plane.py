"""Moving batches: each path against the plain one (memcpy, numpy in Ray, a raw socket), in the same run.

Every destination is compared byte by byte. Ratios to a plain copy take the mean of a copy before and after.
"""

import base64
import gc
import io
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from harness import Figure, figure, ratio, seconds
from raycrew.tensor_transport import (
    BatchedDataDict,
    InlineBackend,
    ObjectStoreBackend,
    RayRefBackend,
    RTensor,
    ShardRead,
    ShardRegistry,
    SharedMemoryBackend,
    TensorShardInfo,
    localize,
    release,
    remotize,
)
from raycrew.tensor_transport.backends.http import HttpBackend, ShardServer
from raycrew.tensor_transport.packing import pack

MIB = 1 << 20


def check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"a benchmark's result is wrong: {what}")


def content(size_bytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8))


def milliseconds(fn: Callable[[], object]) -> float:
    return 1e3 * seconds(fn)


def median_ms(
    name: str, fn: Callable[[], object], *, repeat: int, goal: float | None, baseline: str, per: int = 1
) -> Figure:
    """The time of one call, in ms (or in µs for each of `per` items)."""
    fn()
    scale, unit = (1.0, "ms") if per == 1 else (1e3 / per, "µs")
    samples = [scale * milliseconds(fn) for _ in range(repeat)]
    return figure(name, samples, unit=unit, baseline=baseline, goal=goal)


def bracketed(
    name: str,
    ours: Callable[[], float],
    copy: Callable[[], float],
    *,
    goal: float,
    baseline: str,
    repeat: int,
) -> Figure:
    """How many copies fit into the time of ours, against a copy before and one after; shifting samples go."""
    samples: list[float] = []
    ours()
    copy()
    for _ in range(3 * repeat):
        before, mine, after = copy(), ours(), copy()
        if max(before, after) <= 1.5 * min(before, after):
            samples.append((before + after) / 2 / mine)
        if len(samples) == repeat:
            break
    return figure(name, samples or [0.0], unit="x", baseline=baseline, goal=goal, better="higher")


def object_store(quick: bool) -> list[Figure]:
    size, repeat = (64 if quick else 256) * MIB, 5 if quick else 9
    tensor, array = content(size), content(size).numpy()
    backend = RayRefBackend()

    def timed_put(put: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            kept = put()
            taken = time.perf_counter() - start
            del kept
            time.sleep(0.05)  # The store frees what is let go of in the background.
            return taken

        return run

    ours, plain = timed_put(lambda: backend.put([tensor])), timed_put(lambda: ray.put(array))
    put = ratio(
        "object store: put, speed over numpy",
        ours,
        plain,
        baseline="ray.put of a numpy array",
        goal=0.95,
        better="higher",
        repeat=repeat,
        invert=True,
    )
    default = ratio(
        "object store: put, speed over torch",
        ours,
        timed_put(lambda: ray.put(tensor)),
        baseline="ray.put of a torch tensor",
        goal=10,
        better="higher",
        repeat=3,
        invert=True,
    )
    (shard,) = backend.put([tensor])
    reads = [ShardRead(shard)]
    check(torch.equal(backend.fetch(reads)[0], tensor), "object store")
    get = median_ms(
        f"object store: get {size // MIB} MiB in place",
        lambda: backend.fetch(reads),
        repeat=repeat,
        goal=1.0,
        baseline="a deadline",
    )
    return [put, default, get, *many_small(repeat)]


def many_small(repeat: int) -> list[Figure]:
    tensors = list(content(500 * 32 * 1024).reshape(500, -1).unbind())
    registry = ShardRegistry(RayRefBackend())
    handles = registry.put(tensors)
    into = [torch.empty_like(t) for t in tensors]
    registry.fetch(handles, into=into)
    check(all(map(torch.equal, into, tensors)), "many small tensors")
    backend = RayRefBackend()
    reads = [ShardRead(handle.shard) for handle in handles]
    return [
        median_ms(
            "500 tensors of 32 KiB: put each",
            lambda: backend.put(tensors),
            repeat=repeat,
            goal=60,
            baseline="ray.put each: 1,350 µs",
            per=500,
        ),
        median_ms(
            "500 tensors of 32 KiB: get each, in place",
            lambda: backend.fetch(reads),
            repeat=repeat,
            goal=10,
            baseline="ray.get each: 260 µs",
            per=500,
        ),
        median_ms(
            "500 tensors of 32 KiB: get each, into buffers",
            lambda: registry.fetch(handles, into=into),
            repeat=repeat,
            goal=None,
            baseline="ray.get each: 260 µs",
            per=500,
        ),
    ]


class Worker:
    """An actor that makes and reads batches, the ways that are compared."""

    def __init__(self, stores: Any = None) -> None:
        self._refs = ShardRegistry(RayRefBackend())
        self._stores = stores and ShardRegistry(stores)
        self._rows: torch.Tensor | None = None
        self._into: torch.Tensor | None = None

    def prepare(self, size_bytes: int) -> None:
        self._rows = content(size_bytes).reshape(1024, -1)
        self._into = torch.zeros_like(self._rows)

    def as_numpy(self) -> Any:
        return self._rows.numpy()

    def as_handle(self) -> Any:
        return self._refs.put([self._rows])[0]

    def as_bytes(self) -> bytes:
        stream = io.BytesIO()
        torch.save({"rows": self._rows}, stream)
        return stream.getvalue()

    def take_numpy(self, array: Any) -> bool:
        np.copyto(self._into.numpy(), array)
        return True

    def take_handle(self, handles: list[Any]) -> bool:
        self._refs.fetch(handles, into=[self._into])
        return True

    def take_bytes(self, data: bytes) -> bool:
        self._into.copy_(torch.load(io.BytesIO(data))["rows"])
        return True

    def is_right(self) -> bool:
        good = torch.equal(self._into, self._rows)
        self._into.zero_()
        return good

    def step(self, batch: Any, number: int) -> Any:
        local = localize(batch, self._stores)
        local["reward"] = local["ids"].sum(dim=1)
        return remotize(local, self._stores, step=number)

    def memory_bytes(self) -> int:
        gc.collect()
        return psutil.Process().memory_info().rss - psutil.Process().memory_info().shared


def from_actor_to_actor(quick: bool) -> list[Figure]:
    size = (128 if quick else 2048) * MIB
    maker, user = (ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2))
    ray.get([maker.prepare.remote(size), user.prepare.remote(size)])

    def path(make: str, take: str, *, by_driver: bool) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            made = getattr(maker, make).remote()
            if by_driver:
                made = ray.get(made)
            ray.get(getattr(user, take).remote([made] if make == "as_handle" else made))
            taken = time.perf_counter() - start
            del made
            check(ray.get(user.is_right.remote()), f"{make} to {take}")
            return taken

        return run

    handles = path("as_handle", "take_handle", by_driver=True)
    figures = [
        ratio(
            "actor to actor: handle, speed over numpy",
            handles,
            path("as_numpy", "take_numpy", by_driver=False),
            baseline="a numpy array as result and argument",
            goal=0.95,
            better="higher",
            repeat=3 if quick else 5,
            invert=True,
        ),
        ratio(
            f"{size // MIB} MiB worker, driver, worker: speed over torch.save",
            handles,
            path("as_bytes", "take_bytes", by_driver=True),
            baseline="torch.save bytes by way of the driver",
            goal=10,
            better="higher",
            repeat=2 if quick else 3,
            invert=True,
        ),
    ]
    for actor in (maker, user):
        ray.kill(actor)
    return figures


def shared_memory(quick: bool) -> list[Figure]:
    size, repeat = 64 * MIB, 9 if quick else 25
    tensor, target = content(size), np.zeros(size, np.uint8)
    backend = SharedMemoryBackend(arena_bytes=size)

    def publish() -> float:
        start = time.perf_counter()
        shards = backend.put([tensor])
        taken = time.perf_counter() - start
        backend.release(shards)
        return taken

    figures = [
        bracketed(
            "shared memory: publish 64 MiB, speed over memcpy",
            publish,
            lambda: seconds(lambda: np.copyto(target, tensor.numpy())),
            goal=0.85,
            baseline="numpy copy into warm memory",
            repeat=repeat,
        )
    ]
    (shard,) = backend.put([tensor])
    check(torch.equal(backend.fetch([ShardRead(shard)])[0], tensor), "shared memory")
    figures.append(
        median_ms(
            "shared memory: get 64 MiB in place",
            lambda: backend.fetch([ShardRead(shard)]),
            repeat=repeat,
            goal=1.0,
            baseline="a deadline",
        )
    )
    backend.close()
    return figures


def sharding(quick: bool) -> list[Figure]:
    """A made-up 10 GB batch of handles: 64 producers of 320 rows, dealt out to 64 ranks in random order."""
    rows, width = 320, 2048
    columns = {
        "ids": "int64",
        "logprobs": "float32",
        "mask": "bool",
        "values": "float32",
        "hidden": "bfloat16",
    }

    def made_up(key: str, dtype: str, i: int) -> RTensor:
        shape = (rows, width, 116) if key == "hidden" else (rows, width)
        return RTensor(TensorShardInfo("none", f"{key}-{i}", f"owner-{i}", "", dtype, shape))

    batch = BatchedDataDict(
        {k: RTensor.concat([made_up(k, d, i) for i in range(64)]) for k, d in columns.items()}
    )
    size = sum(column.nbytes for column in batch.values())
    order = torch.randperm(batch.size)[:-7]
    process = psutil.Process()
    before = process.memory_info().rss

    def shard() -> list[Any]:
        return batch.select_indices(order).shard_by_batch_size(64, allow_uneven_shards=True)

    found = median_ms(
        f"shard {size / 1e9:.0f} GB of handles over 64 ranks, reordered and uneven",
        shard,
        repeat=5 if quick else 15,
        goal=50,
        baseline="a deadline",
    )
    grown = [max(0.0, (process.memory_info().rss - before) / MIB)]
    check(sum(part.size for part in shard()) == len(order), "sharding of handles")
    flat = figure("the same: growth of the driver", grown, unit="MiB", baseline="before", goal=32)
    return [found, flat]


def steps(quick: bool) -> list[Figure]:
    """Remotize, dispatch, localize, release: what is left after many steps."""
    count, warm = (30, 10) if quick else (200, 20)
    stores = ObjectStoreBackend.start()
    registry = ShardRegistry(stores)
    workers = [ray.remote(Worker).options(num_cpus=0).remote(stores) for _ in range(2)]
    rows = torch.arange(4096 * 256).reshape(4096, 256)
    driver = psutil.Process()

    def memory() -> list[int]:
        gc.collect()
        mine = driver.memory_info()
        return [mine.rss - mine.shared, *ray.get([w.memory_bytes.remote() for w in workers])]

    before = memory()
    for number in range(count + warm):
        if number == warm:
            before = memory()
        batch = remotize(BatchedDataDict(ids=rows), registry, step=number)
        done = ray.get([w.step.remote(part, number) for w, part in zip(workers, batch.shard(2), strict=True)])
        rewards = localize([part["reward"] for part in done], registry)
        check(torch.equal(torch.cat(rewards), rows.sum(dim=1)), "a step's rewards")
        release([batch, done], registry)
        del batch, done, rewards
    growth = max((after - old) / MIB for old, after in zip(before, memory(), strict=True))
    held = stores.stats().held_bytes
    for worker in workers:
        ray.kill(worker)
    stores.close()
    return [
        figure(f"{count} steps: bytes held at the end", [held], unit="B", baseline="the start", goal=0),
        figure(
            f"{count} steps: growth of the worst process",
            [max(0.0, growth)],
            unit="MiB",
            baseline="after warm-up",
            goal=16,
        ),
    ]


@contextmanager
def raw_socket(data: np.ndarray) -> Iterator[Callable[[np.ndarray], None]]:
    """A thread that sends `data` to whoever asks, and the asking."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    while connection.recv(1):
                        connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    client = socket.create_connection(listener.getsockname())

    def receive(target: np.ndarray) -> None:
        client.send(b"x")
        view = memoryview(target)
        while len(view):
            view = view[client.recv_into(view) :]

    yield receive
    client.close()
    listener.close()


def over_http(quick: bool) -> list[Figure]:
    size = (32 if quick else 128) * MIB
    tensor = content(size)
    target = torch.zeros_like(tensor)
    with ShardServer() as server, raw_socket(tensor.numpy()) as receive:
        backend = HttpBackend(server.url, server.token)
        registry = ShardRegistry(backend)
        handle = registry.put([tensor])[0]

        def ours() -> float:
            return seconds(lambda: registry.fetch([handle], into=[target]))

        def plain() -> float:
            return seconds(lambda: receive(target.numpy()))

        def as_json() -> float:
            start = time.perf_counter()
            text = json.dumps({"data": base64.b64encode(tensor.numpy().tobytes()).decode()}).encode()
            received = np.empty(len(text), np.uint8)
            with raw_socket(np.frombuffer(text, np.uint8)) as fetch:
                fetch(received)
            raw = base64.b64decode(json.loads(received.tobytes())["data"])
            target.numpy()[:] = np.frombuffer(raw, np.uint8)
            return time.perf_counter() - start

        figures = []
        for name, other, goal, baseline in (
            ("over a raw socket", plain, 0.3, "recv_into the same memory"),
            ("over base64 in JSON", as_json, 10, "base64 in JSON over a raw socket"),
        ):
            figures.append(
                ratio(
                    f"HTTP: get {size // MIB} MiB, speed {name}",
                    ours,
                    other,
                    baseline=baseline,
                    goal=goal,
                    better="higher",
                    repeat=3 if quick else 7,
                    invert=True,
                )
            )
            check(torch.equal(target, tensor), f"HTTP or {name}")
        backend.close()
    return figures


def plain_first_fit(lengths: list[int], capacity: int) -> list[int]:
    """First-fit decreasing as one writes it: every bin is looked at for every sequence."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for i, left in enumerate(room):
            if length <= left:
                room[i] -= length
                break
        else:
            room.append(capacity - length)
    return room


def packing(quick: bool) -> list[Figure]:
    draw = np.random.default_rng(0).lognormal(np.log(512), 1.0, 100_000)
    lengths = np.clip(draw, 1, 4096).astype(np.int64)
    some = lengths[: 5_000 if quick else 20_000]
    figures = []
    for algorithm in ("first_fit_decreasing", "modified_first_fit_decreasing", "best_fit_decreasing"):
        samples = [seconds(lambda a=algorithm: pack(lengths, 4096, a)) for _ in range(3)]
        found = pack(lengths, 4096, algorithm)
        check(sum(found.loads) == lengths.sum(), algorithm)
        figures += [
            figure(f"pack 100,000: {algorithm}", samples, unit="s", baseline="a deadline", goal=1),
            figure(
                f"the same: efficiency of {algorithm}",
                [found.efficiency],
                unit="",
                baseline="full bins",
                goal=0.9995,
                better="higher",
            ),
        ]
    once = ratio(
        f"pack {len(some):,}: speed over a plain loop",
        lambda: seconds(lambda: pack(some, 4096, "first_fit_decreasing")),
        lambda: seconds(lambda: plain_first_fit(some.tolist(), 4096)),
        baseline="first-fit decreasing, written plainly",
        repeat=1,
        warmup=0,
        better="higher",
        invert=True,
    )
    return [*figures, once]


def inline(repeat: int = 25) -> list[Figure]:
    registry, small = ShardRegistry(InlineBackend()), torch.arange(64)
    return [
        median_ms(
            "inline: put and fetch 512 bytes",
            lambda: registry.fetch(registry.put([small])),
            repeat=repeat,
            goal=None,
            baseline="",
        )
    ]


def run(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    figures = [*packing(quick), *sharding(quick), *inline(), *shared_memory(quick), *over_http(quick)]
    folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")
    Path(folder, "ray").mkdir()
    os.environ["RAY_TMPDIR"] = folder
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=(1024 if quick else 8192) * MIB,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        figures += [*object_store(quick), *from_actor_to_actor(quick), *steps(quick)]
    finally:
        ray.shutdown()
    return figures
