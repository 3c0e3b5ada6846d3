"""Which class does which work, and the environment that each of them runs in."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from generation import EngineOptions, Generators
from generation.group import PROJECTS, WORKERS
from grpo.config import RunConfig
from grpo.deaths import Deaths
from grpo.options import Options
from grpo.policy import PolicyWorker
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.venv_manager import (
    Environment,
    RegistryEnvironmentProvider,
    Store,
    UvNotFoundError,
    VenvError,
    create_local_venv_on_each_node,
    register_actor_environment,
)
from raycrew.worker_groups import NamedSharding, PhaseManager, RankInfo, RayWorkerGroup

Clusters = tuple[RayVirtualCluster, RayVirtualCluster]
"""The bundles of the policy and of the generators, perhaps the same ones."""
MEMBERS = ("policy", "generator")
"""Who takes turns, where the two do."""
TRAINER = Path(__file__).parent.parent / "environments" / "trainer"


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker.

    Attributes:
        name: Short name shown to people.
        worker: Fully qualified name of the class.
        project: Folder whose project file lists what it needs; None for the driver's own environment.
        env_vars: Variables that it needs from the start.
    """

    name: str
    worker: str
    project: Path | None
    env_vars: Mapping[str, str] = field(default_factory=dict)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ERRORS_ALONE = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all"}
LEARN = ("warm_up", "train", "state", "restore", "done")
"""What is asked of a policy again by itself after a worker has died."""
# Its class is at hand here, so that no process has to import transformers only to say what it is like.
POLICY = WorkerKind("policy", f"{PolicyWorker.__module__}.{PolicyWorker.__qualname__}", TRAINER, ONE_THREAD)
TRANSFORMERS = WorkerKind("transformers", WORKERS["transformers"], TRAINER)
VLLM_CPU = WorkerKind("vLLM", WORKERS["vllm"], PROJECTS / "vllm-cpu", ERRORS_ALONE)
VLLM_GPU = WorkerKind("vLLM", WORKERS["vllm"], PROJECTS / "vllm-gpu", ERRORS_ALONE)


def prepare_environment(kind: WorkerKind, cluster: RayVirtualCluster, console: Console) -> None:
    """Build a kind's environment on each node unless it stands, and register it for its class."""
    if kind.project is None:
        return
    command = f"uv run --directory {kind.project}"
    python = create_local_venv_on_each_node(command, f"grpo-{kind.project.name}", cluster)
    register_actor_environment(kind.worker, command)
    folder = Path(python).parent.parent
    size = next((f" ({_size(found)})" for found in Store().environments() if str(found.python) == python), "")
    console.print(f"{kind.name} environment: {folder}{size}", soft_wrap=True)


def choose_generator(options: Options, cluster: RayVirtualCluster, console: Console) -> WorkerKind:
    """The kind of generator that was asked for, or the plain one where vLLM can't be installed."""
    kind = TRANSFORMERS if options.generator != "vllm" else VLLM_GPU if options.gpus else VLLM_CPU
    if not options.environments:
        return replace(kind, project=None)
    if kind is not TRANSFORMERS:
        try:
            prepare_environment(kind, cluster, console)
        except UvNotFoundError:
            raise
        except VenvError as error:
            console.print("vLLM can't be installed here, so the transformers generator takes its place:")
            console.print(str(error), markup=False, style="dim")
        else:
            return kind
    prepare_environment(TRANSFORMERS, cluster, console)
    return TRANSFORMERS


@contextmanager
def start_groups(
    clusters: Clusters,
    policy: WorkerKind,
    generator: WorkerKind,
    *,
    config: RunConfig,
    directory: WeightDirectory,
    deaths: Deaths,
    phases: PhaseManager | None = None,
) -> Iterator[tuple[RayWorkerGroup, Generators]]:
    """The policy and the generators, with one rank of each per bundle of its own; who dies is replaced.

    Both start at the same time, or with `phases` one after the other, so that never both have the device's
    memory: if one can't, neither stays.
    """
    both: dict[str, Any] = {
        "environments": RegistryEnvironmentProvider(),
        "restart_on_failure": True,
        "on_worker_failure": deaths.note,
    }

    def sleeper(name: str, **init: Any) -> Callable[[RankInfo], dict[str, Any]]:
        """What gives a worker's arguments: who is replaced comes up asleep unless it has its turn."""
        return lambda _: init if phases is None else {**init, "asleep": not phases.may_wake(name)}

    learning = partial(
        RayWorkerGroup.start,
        clusters[0],
        policy.worker,
        name_prefix="policy",
        sharding_annotations=NamedSharding(list(range(clusters[0].world_size())), ["data"]),
        env_vars=dict(policy.env_vars),
        idempotent_methods=LEARN if phases is None else (*LEARN, "offload", "onload"),
        init=sleeper("policy", config=config, directory=directory),
        **both,
    )
    dozes = phases is not None and generator.worker == VLLM_GPU.worker
    sampling = partial(
        Generators.start,
        clusters[1],
        generator.worker,
        EngineOptions(config.model.as_llama(), seed=config.seed, sleep_level=2 if dozes else None),
        name_prefix="generator",
        env_vars=generator.env_vars,
        worker_options=sleeper(
            "generator", directory=directory, store=SharedMemoryTransport, on_update="finish"
        ),
        **both,
    )
    with ExitStack() as stack:
        if phases is None:
            yield asyncio.run(_at_once(stack, learning(), sampling()))
        else:
            yield asyncio.run(_in_turns(stack, phases, learning, sampling))


async def _in_turns(
    stack: ExitStack, phases: PhaseManager, learning: Callable[[], Any], sampling: Callable[[], Any]
) -> tuple[RayWorkerGroup, Generators]:
    """What both give, entered: the policy is asleep before there is a generator."""
    async with phases.turn("policy"):
        policy: RayWorkerGroup = stack.enter_context(await learning())
        phases.add("policy", policy, sleep="offload", wake="onload")
    async with phases.turn("generator"):
        generators: Generators = stack.enter_context(await sampling())
        phases.add("generator", generators.group)
    return policy, generators


async def _at_once(stack: ExitStack, *starting: Coroutine[Any, Any, Any]) -> Any:
    """What all give, entered; when one fails, the others are given up, and its error is raised."""

    async def entered(one: Coroutine[Any, Any, Any]) -> Any:
        return stack.enter_context(await one)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(entered(one)) for one in starting]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in running)


def _size(environment: Environment) -> str:
    return f"{environment.stamp['size_bytes'] / 1e9:.1f} GB"
