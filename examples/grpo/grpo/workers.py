"""Which class does which work, and the environment that each of them runs in."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

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

ENVIRONMENTS = Path(__file__).parent.parent / "environments"


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker, known to the driver by name only.

    Attributes:
        name: Short name shown to people.
        worker: Fully qualified name of the class.
        project: Folder under `environments/` whose project file lists what it needs; None for the driver's
            own environment.
        env_vars: Variables that it needs from the start.
        repeatable: Methods that are called again by themselves after a worker has died.
    """

    name: str
    worker: str
    project: str | None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    repeatable: Sequence[str] = ()


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# The engine in the worker's own process, nothing compiled, nothing fetched, nothing said but errors.
VLLM_VARIABLES = {
    **ONE_THREAD,
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
LEARN = ("warm_up", "train", "state", "restore", "done")
SAMPLE = ("generate",)
POLICY = WorkerKind("policy", "grpo.policy.PolicyWorker", "trainer", ONE_THREAD, LEARN)
TRANSFORMERS = WorkerKind(
    "transformers", "grpo.transformers_generator.TransformersGenerator", "trainer", ONE_THREAD, SAMPLE
)
VLLM_CPU = WorkerKind("vLLM", "grpo.vllm_generator.VllmGenerator", "vllm-cpu", VLLM_VARIABLES, SAMPLE)
VLLM_GPU = WorkerKind("vLLM", "grpo.vllm_generator.VllmGenerator", "vllm-gpu", VLLM_VARIABLES, SAMPLE)


def prepare_environment(kind: WorkerKind, cluster: RayVirtualCluster, console: Console) -> None:
    """Build a kind's environment on each node unless it stands, and register it for its class."""
    if kind.project is None:
        return
    command = f"uv run --directory {ENVIRONMENTS / kind.project}"
    python = create_local_venv_on_each_node(command, f"grpo-{kind.project}", cluster)
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
    kinds: Mapping[str, WorkerKind],
    *,
    config: RunConfig,
    directory: WeightDirectory,
    deaths: Deaths,
) -> Iterator[list[RayWorkerGroup]]:
    """A group of each kind, by name, with one rank per bundle; their workers are replaced when they die.

    All start at the same time: if one can't, none stays.
    """

    async def start(name: str, kind: WorkerKind) -> RayWorkerGroup:
        group = await RayWorkerGroup.start(
            cluster,
            kind.worker,
            name_prefix=name,
            sharding_annotations=NamedSharding(list(range(cluster.world_size())), ["data"]),
            env_vars=dict(kind.env_vars),
            environments=RegistryEnvironmentProvider(),
            restart_on_failure=True,
            idempotent_methods=kind.repeatable,
            on_worker_failure=deaths.note,
            config=config,
            directory=directory,
        )
        return stack.enter_context(group)

    with ExitStack() as stack:
        yield asyncio.run(_at_once([start(*item) for item in kinds.items()]))


async def _at_once(starting: Sequence[Coroutine[Any, Any, RayWorkerGroup]]) -> list[RayWorkerGroup]:
    """What they give; when one fails, the others are given up, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in starting]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


def _size(folder: Path) -> str:
    files = (path.lstat() for path in folder.rglob("*"))
    return f"{sum(f.st_size for f in files) / 1e9:.1f} GB"
