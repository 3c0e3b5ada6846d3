"""From the command line to the files: a cluster, two groups of workers, the loop, the report."""

import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import FrameType
from typing import Any

from rich.console import Console

from grpo.display import RunDisplay
from grpo.errors import ExampleError
from grpo.loop import GrpoLoop
from grpo.options import Options, parse_options
from grpo.report import prepare_folder, write_report
from grpo.workers import POLICY, WorkerKind, choose_generator, prepare_environment
from raycrew.cluster_core import ClusterError, RayVirtualCluster, init_ray
from raycrew.tensor_transport import TransportError
from raycrew.venv_manager import RegistryEnvironmentProvider, VenvError
from raycrew.worker_groups import NamedSharding, RayWorkerGroup, WorkerFailureError, WorkerGroupError

CPU_WORKERS = 2
GROUPS = 2
VERIFIER_CPUS = 4
EXPECTED = (ExampleError, ClusterError, WorkerGroupError, TransportError, VenvError)


def main(arguments: Sequence[str] | None = None, *, policy: WorkerKind = POLICY) -> int:
    """Run the example; the process's exit code.

    Args:
        arguments: The command line, without the program's name; the process's own if left out.
        policy: What the policy group's workers are.
    """
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("raycrew.venv_manager").setLevel(logging.INFO)
    try:
        run(options, policy, Console(highlight=False))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except EXPECTED as error:
        return _fail(f"error: {_in_one_line(error)}", 1)
    return 0


def run(options: Options, policy_kind: WorkerKind, console: Console) -> None:
    """The whole run, from an empty machine to the report."""
    folder = prepare_folder(options.output)
    n_workers = options.gpus or CPU_WORKERS
    with ExitStack() as stack:
        stack.enter_context(init_ray("local", num_cpus=GROUPS * n_workers + VERIFIER_CPUS))
        cluster = stack.enter_context(
            RayVirtualCluster(
                [n_workers],
                use_gpus=options.gpus > 0,
                num_gpus_per_node=n_workers,
                max_colocated_worker_groups=GROUPS,
                name="grpo",
            )
        )
        prepare_environment(policy_kind, cluster, console)
        policy = stack.enter_context(_start(cluster, policy_kind, "policy", options))
        generator_kind = choose_generator(options, cluster, console)
        generators = stack.enter_context(_start(cluster, generator_kind, "generator", options))
        start = time.perf_counter()
        cluster.print_all_worker_groups([policy, generators])
        loop = GrpoLoop(options.config, policy, generators)
        _train(loop, console)
        policy.call("close").get_results(timeout=30)
    about = _about(options, generator_kind, time.perf_counter() - start)
    files = write_report(loop.history, about, folder)
    console.print(loop.history.summary)
    for file in files:
        console.print(str(file), soft_wrap=True)


def _start(cluster: RayVirtualCluster, kind: WorkerKind, name: str, options: Options) -> RayWorkerGroup:
    return RayWorkerGroup(
        cluster,
        kind.worker,
        name_prefix=name,
        sharding_annotations=NamedSharding(list(range(cluster.world_size())), ["data"]),
        env_vars=dict(kind.env_vars),
        environments=RegistryEnvironmentProvider(),
        config=options.config,
    )


def _train(loop: GrpoLoop, console: Console) -> None:
    """The supervised phase, then the rounds of GRPO, shown as they go."""
    with console.status("warm-up") as status:
        loss = loop.warm_up(lambda steps, loss: status.update(f"warm-up: step {steps}, loss {loss:.3f}"))
    console.print(f"warm-up: {loop.config.warmup.steps} supervised steps, loss {loss:.2f}")
    with RunDisplay(console, loop.history, loop.config.grpo.steps) as display:
        loop.run(display.update)
    console.print(loop.history.time_split())


def _about(options: Options, generator: WorkerKind, seconds: float) -> dict[str, Any]:
    """What a reader of the report needs to know about the run."""
    config = options.config
    parts = [
        f"sort {config.digits} digits",
        f"{generator.name} generator",
        f"{options.gpus} GPU(s)" if options.gpus else "CPU",
        f"seed {config.seed}",
        *([] if config.synchronise else ["generator never synchronised"]),
    ]
    return {
        "title": ", ".join(parts),
        "generator": generator.name,
        "config": asdict(config),
        "wall_s": seconds,
    }


def _in_one_line(error: BaseException) -> str:
    """What happened, without tracebacks and logs; of several failures the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = error.message if isinstance(error, WorkerFailureError) else str(error)
    return " ".join(text.split())


def _fail(message: str, code: int) -> int:
    Console(stderr=True, highlight=False).print(message, soft_wrap=True, markup=False)
    return code


def _end(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(143)
