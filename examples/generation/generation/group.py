"""The driver's side: replicas of a generator, each prompt to one of them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from generation.errors import RefusedError
from generation.lending import VISIBLE, Lent
from generation.metrics import GenerationMetrics
from generation.options import EngineOptions, check_device, check_store
from generation.prompts import Limits, Prompt, check_stops, read_prompts
from generation.sampling import Sampling
from generation.transformers_worker import TransformersWorker
from generation.vllm_worker import VllmWorker
from raycrew.cluster_core import Bundle, Cluster, accelerators_of
from raycrew.tensor_transport import BatchedDataDict
from raycrew.worker_groups import MultiWorkerFuture, RankInfo, RayWorkerGroup

# A driver that has the classes needs no process to say what they are like; their engines are imported late.
KINDS = {"transformers": TransformersWorker, "vllm": VllmWorker}
WORKERS = {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in KINDS.items()}
ENVIRONMENTS = {"transformers": "transformers", "vllm": "vllm-cpu", "vllm-gpu": "vllm-gpu"}
PROJECTS = Path(__file__).parent.parent / "environments"
PREFIX_TOKENS = 32
# Nothing compiled, nothing fetched, the engine in the worker's process; what makes several processes on a CPU
# share its cores; no progress bars, and no warnings of waits, which are in threads that may wait.
VARIABLES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Generators:
    """Data-parallel replicas of a generator, over which prompts are balanced.

    Args:
        group: Workers of the kind `generation.worker.GenerationWorker`, with a balancer; `start_generators`
            makes one.
        keyed: Whether the balancer goes by keys, as `consistent_hash` does: prompts that begin alike go to
            the same replica then, whose prefix cache knows them.
    """

    def __init__(self, group: RayWorkerGroup, *, keyed: bool = False) -> None:
        self.group, self._keyed = group, keyed

    @classmethod
    async def start(cls, cluster: Cluster, worker: str, options: EngineOptions, **how: Any) -> Self:
        """`start_generators`, without blocking the event loop."""
        plan = _plan(cluster, worker, options, **how)
        return cls(await RayWorkerGroup.start(**plan.group), keyed=plan.keyed)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The ranks that generate: the first of each tied group, which are all without such groups."""
        return tuple(ranks[0] for ranks in self.group.tied_workers_groups)

    @cached_property
    def limits(self) -> Limits:
        """What the model can take, as a replica says."""
        found: Limits = self.group.on(ranks=[self.leaders[0]]).call("limits").get_results()[0]
        return found

    def generate(
        self, batch: BatchedDataDict, sampling: Sampling | Mapping[str, Any] | None = None, **call: Any
    ) -> BatchedDataDict:
        """Sample from each prompt of a batch, in the batch's order.

        Args:
            batch: As for `GenerationWorker.generate`.
            sampling: As there.
            **call: `request_id`, `adapter` and `timeout`, and `prompts_per_call`: how many prompts go to a
                replica at a time (16; always 1 where it goes by their beginnings).

        Raises:
            PromptError: A prompt can't be taken; nothing is sent then.
            SamplingError: There is no such option; nothing is sent then.
            ValueError: `prompts_per_call` is below 1; nothing is sent then.
            WorkerFailureError: A replica failed, twice if `generate` may be sent again.
        """
        items, kwargs = self._items(batch, sampling, call)
        found = self.group.balancer.map("generate", items, **kwargs)
        return BatchedDataDict.from_batches(list(found))

    def stream(
        self, batch: BatchedDataDict, sampling: Sampling | Mapping[str, Any] | None = None, **call: Any
    ) -> Iterator[BatchedDataDict]:
        """The samples of each prompt as soon as all of them have ended; `prompt_index` tells whose they are.

        Each prompt is there once, also where a replica dies and another one takes its prompts over.

        Raises:
            Exception: As `generate`.
        """
        items, kwargs = self._items(batch, sampling, {"prompts_per_call": 1, **call})
        return (found for _, found in self.group.balancer.as_completed("generate", items, **kwargs))

    def begin(
        self,
        batch: BatchedDataDict,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        **call: Any,
    ) -> MultiWorkerFuture[BatchedDataDict]:
        """Send each replica an even run of a batch's prompts, and wait for nothing.

        Which replica gets which prompts depends on nothing but the batch. One that dies is replaced, and its
        prompts go to whoever took its place.

        Args:
            batch: As for `GenerationWorker.generate`.
            sampling: As there.
            timeout: Deadline in seconds.
            **call: `request_id` and `adapter`.

        Returns:
            Samples of each run, in the batch's order; to be awaited, or asked for its results.

        Raises:
            PromptError: A prompt can't be taken; nothing is sent then.
            SamplingError: There is no such option; nothing is sent then.
        """
        chosen, prompts = self._checked(batch, sampling)
        return self.group.run_all_workers_multiple_data(
            "generate",
            _batch_of(prompts).shard(min(len(self.leaders), len(prompts))),
            common_kwargs={"sampling": chosen, **call},
            only_on="tied_leader",
            allow_partial=True,
            timeout=timeout,
        )

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method on each replica: "pause", "resume", "abort", "check", "sleep", "wake" and so on."""
        replicas = self.group.on(ranks=list(self.leaders), timeout=timeout)
        return list(replicas.call(method, *args, **kwargs).get_results())

    def metrics(self) -> list[GenerationMetrics]:
        """What each replica is at."""
        return self.call("metrics")

    def shutdown(self) -> None:
        """End all workers, and their engines."""
        self.group.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _checked(self, batch: BatchedDataDict, sampling: Any) -> tuple[Sampling, list[Prompt]]:
        chosen, prompts = Sampling.of(sampling), read_prompts(batch, self.limits)
        check_stops(chosen, self.limits)
        return chosen, prompts

    def _items(
        self, batch: BatchedDataDict, sampling: Any, call: dict[str, Any]
    ) -> tuple[list[BatchedDataDict], dict[str, Any]]:
        """Parts of the batch, and how they are sent; everything is checked."""
        chosen, prompts = self._checked(batch, sampling)
        size = call.pop("prompts_per_call", 16)
        if size < 1:
            raise ValueError(f"prompts_per_call must be at least 1, not {size!r}")
        size = 1 if self._keyed else size
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        how = {"timeout": call.pop("timeout", None), "max_outstanding": max(2, 256 // size)}
        key: Callable[[BatchedDataDict], Any] = _beginning_of
        return [_batch_of(part) for part in parts], {
            **how,
            "key": key if self._keyed else None,
            "common_kwargs": {"sampling": chosen, **call},
        }


def start_generators(
    cluster: Cluster,
    worker: str,
    options: EngineOptions,
    *,
    balancing: str = "least_outstanding",
    env_vars: Mapping[str, str] | None = None,
    restart_on_failure: bool = True,
    worker_options: Mapping[str, Any] | Callable[[RankInfo], Mapping[str, Any]] | None = None,
    **group: Any,
) -> Generators:
    """A replica on each bundle, or on as many consecutive ones as an engine is spread over.

    Args:
        cluster: Whose bundles they take.
        worker: "vllm" or "transformers", or the full name of a class.
        options: The engine of each.
        balancing: "least_outstanding", "consistent_hash" (prompts that begin alike go to one replica) or
            another strategy of the group.
        env_vars: Further variables of the workers.
        restart_on_failure: Whether replicas are replaced that are dead, or whose engine has lost a process;
            what they had not answered is sent again.
        worker_options: `directory`, `store`, `on_update`, `asleep` and `endpoint` of the workers; or a
            function that gives those of a rank, called again for a worker that is replaced.
        **group: Further options of `RayWorkerGroup`, such as `environments` and `name_prefix`.

    Raises:
        RefusedError: The engine can't do what the options ask for, or not on these bundles; no actor is
            started then.
        ValueError: The bundles can't be shared out so, or `store` is one of this process, and not what makes
            one (`store=RouteStore`); no actor is started then.
    """
    how: dict[str, Any] = {
        "balancing": balancing,
        "env_vars": env_vars,
        "restart_on_failure": restart_on_failure,
    }
    plan = _plan(cluster, worker, options, worker_options=worker_options, **how, **group)
    return Generators(RayWorkerGroup(**plan.group), keyed=plan.keyed)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a group of replicas is made with."""

    group: Mapping[str, Any]
    keyed: bool


def _plan(
    cluster: Cluster,
    worker: str,
    options: EngineOptions,
    *,
    balancing: str = "least_outstanding",
    env_vars: Mapping[str, str] | None = None,
    restart_on_failure: bool = True,
    worker_options: Mapping[str, Any] | Callable[[RankInfo], Mapping[str, Any]] | None = None,
    **group: Any,
) -> _Plan:
    """See `start_generators`."""
    check_device(options, _device_kind(cluster))
    size, bundles = options.tensor_parallel, len(cluster.bundles)
    if bundles % size:
        raise ValueError(f"{bundles} bundles can't be shared out to engines over {size} each")
    if size > 1 and options.chosen_executor == "mp":
        for start in range(0, bundles, size):
            _check_children(cluster.bundles[start : start + size])

    fixed = worker_options if isinstance(worker_options, Mapping) else {}
    check_store(fixed.get("store"))
    is_updated = fixed.get("directory") is not None
    lent = Lent(cluster, size, is_updated) if options.executor == "ray" else None

    def init_of(rank: RankInfo) -> dict[str, Any]:
        given = worker_options(rank) if callable(worker_options) else fixed
        check_store(given.get("store"))
        own = {} if lent is None else {"variables": lent.variables(rank)}
        ends = {"ends_with_engine": restart_on_failure}
        return {"options": options, **ends, **own, **given, "leads": rank.rank % size == 0}

    path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    tied = [list(range(start, start + size)) for start in range(0, bundles, size)]
    return _Plan(
        {
            "cluster": lent or cluster,
            "worker": WORKERS.get(worker, worker),
            "init": init_of,
            "env_vars": {**VARIABLES, **(VISIBLE if lent else {}), "PYTHONPATH": path, **(env_vars or {})},
            "bundle_indices_list": tied if size > 1 else None,
            "enable_load_balancing": True,
            "load_balancing_strategy": balancing,
            "idempotent_methods": ("check", "endpoint", "generate", "sleep", "wake"),
            "restart_on_failure": restart_on_failure,
            **group,
        },
        balancing == "consistent_hash",
    )


def _check_children(bundles: Sequence[Bundle]) -> None:
    """Refuse bundles on which the children of their leader can't be an engine.

    Raises:
        RefusedError: They are on several nodes, or the leader's devices are fewer than they.
    """
    if len({bundle.node_id for bundle in bundles}) > 1:
        raise RefusedError(
            "the executor 'mp' has all processes of an engine on one node, and its bundles are on several: "
            "give each engine bundles of one node, or use 'ray' on accelerators"
        )
    resources = bundles[0].resources
    for name in accelerators_of(resources):
        if (held := resources[name]) < len(bundles):
            raise RefusedError(
                f"the executor 'mp' has an engine over {len(bundles)} devices as children of one worker, "
                f"which has {held:g} {name}: use executor='ray', which takes those of all its bundles"
            )


def _device_kind(cluster: Cluster) -> str:
    return "accelerator" if any(accelerators_of(one.resources) for one in cluster.bundles) else "cpu"


def _batch_of(prompts: Sequence[Prompt]) -> BatchedDataDict:
    return BatchedDataDict(
        {
            "prompt_ids": [list(prompt.tokens) for prompt in prompts],
            "prompt_index": torch.tensor([prompt.index for prompt in prompts]),
        }
    )


def _beginning_of(batch: BatchedDataDict) -> tuple[int, ...]:
    return tuple(batch["prompt_ids"][0][:PREFIX_TOKENS])
