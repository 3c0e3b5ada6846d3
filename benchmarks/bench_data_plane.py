"""Moving batches: each path against the plain one (memcpy, numpy in Ray, a raw socket), in the same run.

Every destination is compared byte by byte. Ratios to a plain copy take the mean of a copy before and after.
"""

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
import torch

import bench_packing
from data_plane import MIB, bracketed, check, content, median_ms
from data_plane_http import over_http
from data_plane_steps import steps
from harness import Figure, figure, ratio, seconds
from own_ray import own_ray
from raycrew.tensor_transport import (
    BatchedDataDict,
    InlineBackend,
    NodeMemoryBackend,
    RayRefBackend,
    RTensor,
    ShardRead,
    ShardRegistry,
    SharedMemoryBackend,
    TensorShardInfo,
)


def object_store(quick: bool) -> list[Figure]:
    size, repeat = (64 if quick else 256) * MIB, 5 if quick else 9
    tensor, array = content(size), content(size).numpy()
    registry = ShardRegistry(RayRefBackend())
    ray.put(np.zeros(4 * size, np.uint8))  # Wherever an object comes to lie, its pages are there.

    def timed_put(
        put: Callable[[Any], Any], get: Callable[[Any], Any], what: Any, small: Any
    ) -> Callable[[], float]:
        def run() -> float:
            put(small)  # So that the code is in the caches, after the last check.
            start = time.perf_counter()
            kept = put(what)
            taken = time.perf_counter() - start
            check(np.array_equal(get(kept), array), "what was put")
            del kept
            time.sleep(0.05)  # The store frees what is let go of in the background.
            return taken

        return run

    ours = timed_put(
        lambda tensor: registry.put([tensor]),
        lambda kept: registry.fetch(kept, borrow=True)[0].numpy(),
        tensor,
        tensor[:4096],
    )
    plain = timed_put(ray.put, ray.get, array, array[:4096])
    put = ratio(
        "object store: put, speed over numpy",
        ours,
        plain,
        baseline="ray.put of a numpy array",
        goal=0.95,
        better="higher",
        repeat=25,
        warmup=3,
        invert=True,
    )
    default = ratio(
        "object store: put, speed over torch",
        ours,
        timed_put(ray.put, lambda kept: ray.get(kept).numpy(), tensor, tensor[:4096].clone()),
        baseline="ray.put of a torch tensor",
        goal=10,
        better="higher",
        repeat=7,
        invert=True,
    )
    handles = registry.put([tensor])
    get = in_place(
        f"object store: get {size // MIB} MiB in place",
        lambda: registry.fetch(handles, borrow=True),
        tensor,
        repeat,
    )
    return [put, default, *get, *many_small(repeat)]


def in_place(
    name: str, fetch: Callable[[], list[torch.Tensor]], tensor: torch.Tensor, repeat: int
) -> list[Figure]:
    def is_right(fetched: list[torch.Tensor]) -> bool:
        return torch.equal(fetched[0], tensor)

    return [
        median_ms(name, fetch, is_right=is_right, repeat=repeat, goal=1.0, baseline="a deadline"),
        median_ms(
            f"{name}, cold",
            fetch,
            is_right=is_right,
            repeat=repeat,
            goal=None,
            baseline="right after all bytes were read",
            cold=True,
        ),
    ]


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

    def __init__(self) -> None:
        self._refs = ShardRegistry(RayRefBackend())
        self._lent = ShardRegistry(NodeMemoryBackend(), RayRefBackend())
        self._rows: torch.Tensor | None = None
        self._into: torch.Tensor | None = None
        self._received: torch.Tensor | None = None

    def prepare(self, size_bytes: int, *, with_target: bool) -> None:
        self._rows = content(size_bytes).reshape(1024, -1)
        self._into = torch.zeros_like(self._rows) if with_target else None

    def as_numpy(self) -> Any:
        return self._rows.numpy()

    def as_handle(self) -> Any:
        return self._refs.put([self._rows])[0]

    def as_lent(self) -> Any:
        return self._lent.put([self._rows])[0]

    def as_bytes(self) -> bytes:
        stream = io.BytesIO()
        torch.save({"rows": self._rows}, stream)
        return stream.getvalue()

    def take_numpy(self, array: Any) -> None:
        np.copyto(self._into.numpy(), array)
        self._received = self._into

    def take_handle(self, handles: list[Any]) -> None:
        self._refs.fetch(handles, into=[self._into])
        self._received = self._into

    def take_lent(self, handles: list[Any]) -> None:
        self._received = self._lent.fetch(handles)[0]
        int(self._received.view(-1)[::4096].sum())  # So that every page is there.

    def take_bytes(self, data: bytes) -> None:
        self._received = torch.load(io.BytesIO(data))["rows"]

    def is_right(self) -> bool:
        good = torch.equal(self._received, self._rows)
        self._received = None
        if self._into is not None:
            self._into.zero_()
        return good


def from_actor_to_actor(quick: bool) -> list[Figure]:
    size = (128 if quick else 2048) * MIB
    copied = {
        "name": "actor to actor: handle, speed over numpy",
        "baseline": "a numpy array as result and argument",
        "goal": 0.95,
        "repeat": 5,
        "warmup": 3,
        "note": "both copy into warm memory of the receiver",
    }
    mapped = {
        "name": f"{size // MIB} MiB worker, driver, worker: speed over torch.save",
        "baseline": "torch.save bytes by way of the driver",
        "goal": 10,
        "repeat": 2 if quick else 3,
        "note": "the receiver has a tensor of its own: mapped privately, or loaded",
    }
    figures = []
    for options, ours, theirs, by_driver in (
        (copied, "handle", "numpy", False),
        (mapped, "lent", "bytes", True),
    ):
        maker, user = (ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2))
        ray.get([a.prepare.remote(size, with_target=a is user and not by_driver) for a in (maker, user)])

        def path(kind: str, by_driver: bool, maker: Any = maker, user: Any = user) -> float:
            start = time.perf_counter()
            made = getattr(maker, f"as_{kind}").remote()
            if by_driver:
                made = ray.get(made)
            ray.get(getattr(user, f"take_{kind}").remote([made] if isinstance(made, RTensor) else made))
            taken = time.perf_counter() - start
            del made
            check(ray.get(user.is_right.remote()), kind)
            return taken

        figures.append(
            ratio(
                ours=lambda path=path, kind=ours: path(kind, True),
                theirs=lambda path=path, kind=theirs, by_driver=by_driver: path(kind, by_driver),
                better="higher",
                invert=True,
                **options,
            )
        )
        for actor in (maker, user):
            ray.kill(actor)
    return figures


def shared_memory(quick: bool) -> list[Figure]:
    size, repeat = 64 * MIB, 9 if quick else 25
    tensor, target = content(size), np.zeros(size, np.uint8)
    backend, small = SharedMemoryBackend(arena_bytes=size), content(4096)

    def publish() -> float:
        backend.release(backend.put([small]))  # So that the code is in the caches, after the last check.
        start = time.perf_counter()
        shards = backend.put([tensor])
        taken = time.perf_counter() - start
        check(torch.equal(backend.fetch([ShardRead(shards[0])])[0], tensor), "shared memory")
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
    read = [ShardRead(shard)]
    figures += in_place("shared memory: get 64 MiB in place", lambda: backend.fetch(read), tensor, repeat)
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
        return batch.select_indices(order).shard_by_batch_size(64, allow_uneven_shards=True).shards

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
    figures = [
        *bench_packing.run(quick=True),
        *sharding(quick),
        *inline(),
        *shared_memory(quick),
        *over_http(quick),
    ]
    with own_ray(1024 if quick else 6144):
        figures += [*object_store(quick), *from_actor_to_actor(quick), *steps(quick)]
    return figures
