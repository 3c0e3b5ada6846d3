"""The driver's side: replicas of a generator, each prompt to one of them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from generation.metrics import GenerationMetrics
from generation.options import EngineOptions, check_device
from generation.prompts import Limits, Prompt, read_prompts
from generation.sampling import Sampling
from raycrew.cluster_core import Cluster
from raycrew.tensor_transport import BatchedDataDict
from raycrew.worker_groups import RankInfo, RayWorkerGroup

WORKERS = {
    "transformers": "generation.transformers_worker.TransformersWorker",
    "vllm": "generation.vllm_worker.VllmWorker",
}
ENVIRONMENTS = {"transformers": "transformers", "vllm": "vllm-cpu", "vllm-gpu": "vllm-gpu"}
PROJECTS = Path(__file__).parent.parent / "environments"
PREFIX_TOKENS = 32
# Nothing compiled, nothing fetched, the engine in the worker's process; and what makes several processes on a
# CPU share its cores.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
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
        leaders: The ranks that generate: the first of each tied group, which are all without such groups.
        keyed: Whether the balancer goes by keys, as `consistent_hash` does: prompts that begin alike go to
            the same replica then, whose prefix cache knows them.
    """

    def __init__(self, group: RayWorkerGroup, leaders: Sequence[int], *, keyed: bool = False) -> None:
        self.group, self.leaders, self._keyed = group, tuple(leaders), keyed
        on_first = group.on(ranks=[self.leaders[0]])
        self.limits: Limits = on_first.call("limits").get_results()[0]

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

    def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method on each replica: "pause", "resume", "abort", "sleep", "wake", "explain" and so on."""
        replicas = self.group.on(ranks=list(self.leaders), timeout=timeout)
        return list(replicas.call(method, *args).get_results())

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

    def _items(
        self, batch: BatchedDataDict, sampling: Any, call: dict[str, Any]
    ) -> tuple[list[BatchedDataDict], dict[str, Any]]:
        """Parts of the batch, and how they are sent; everything is checked."""
        chosen, prompts = Sampling.of(sampling), read_prompts(batch, self.limits)
        size = 1 if self._keyed else call.pop("prompts_per_call", 16)
        call.pop("prompts_per_call", None)
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
    worker_options: Mapping[str, Any] | None = None,
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
        restart_on_failure: Whether dead replicas are replaced; what they had not answered is sent again.
        worker_options: `directory`, `store` and `on_update` of the workers.
        **group: Further options of `RayWorkerGroup`, such as `environments` and `name_prefix`.

    Raises:
        RefusedError: The engine can't do what the options ask for; no actor is started then.
        ValueError: The bundles can't be shared out so.
    """
    check_device(options, _device_kind(cluster))
    size, bundles = options.tensor_parallel, len(cluster.bundles)
    if bundles % size:
        raise ValueError(f"{bundles} bundles can't be shared out to engines over {size} each")
    mine = {"options": options, **(worker_options or {})}

    def init_of(rank: RankInfo) -> dict[str, Any]:
        return {**mine, "leads": rank.rank % size == 0}

    path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    tied = [list(range(start, start + size)) for start in range(0, bundles, size)]
    made = RayWorkerGroup(
        cluster,
        WORKERS.get(worker, worker),
        init=init_of,
        env_vars={**VARIABLES, "PYTHONPATH": path, **(env_vars or {})},
        bundle_indices_list=tied if size > 1 else None,
        enable_load_balancing=True,
        load_balancing_strategy=balancing,
        idempotent_methods=("generate",),
        restart_on_failure=restart_on_failure,
        **group,
    )
    try:
        return Generators(made, range(0, bundles, size), keyed=balancing == "consistent_hash")
    except BaseException:
        made.shutdown(force=True)
        raise


def _device_kind(cluster: Cluster) -> str:
    held = {name for bundle in cluster.bundles for name in bundle.resources}
    return "cpu" if held <= {"CPU", "memory"} else "accelerator"


def _batch_of(prompts: Sequence[Prompt]) -> BatchedDataDict:
    return BatchedDataDict(
        {
            "prompt_ids": [list(prompt.tokens) for prompt in prompts],
            "prompt_index": torch.tensor([prompt.index for prompt in prompts]),
        }
    )


def _beginning_of(batch: BatchedDataDict) -> tuple[int, ...]:
    return tuple(batch["prompt_ids"][0][:PREFIX_TOKENS])
