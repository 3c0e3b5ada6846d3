"""From the command line to the files: a cluster, two groups of workers, the loop, the report."""

import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from types import FrameType
from typing import Any

from rich.console import Console

from grpo.asynchronous import AsyncGrpoLoop
from grpo.checkpoint import Checkpoint, settings_of
from grpo.comparison import write_comparison
from grpo.crew import Crew
from grpo.deaths import Deaths
from grpo.display import RunDisplay
from grpo.errors import ExampleError
from grpo.history import History
from grpo.layout import Layout
from grpo.loop import GrpoLoop
from grpo.options import Options, parse_options
from grpo.pace import Pace, Stopwatch, behind, comparison, in_turns, overlapped
from grpo.report import prepare_folder, write_report
from grpo.startup import StartClock, start_rows, start_table
from grpo.workers import (
    MEMBERS,
    POLICY,
    Clusters,
    WorkerKind,
    choose_generator,
    prepare_environment,
    start_groups,
)
from raycrew.cluster_core import ClusterError, RayVirtualCluster, init_ray
from raycrew.tensor_transport import TransportError, WeightDirectory
from raycrew.venv_manager import VenvError
from raycrew.worker_groups import PhaseManager, WorkerFailureError, WorkerGroupError, timeline

GROUPS = 2
AT_ONCE, ONE_BY_ONE = "groups, both at once", "groups, one by one"
VERIFIER_CPUS = 4
CHECKPOINTS = "checkpoint"
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
    if not options.environments:
        policy_kind = replace(policy_kind, project=None)
    folder = prepare_folder(options.output)
    layout = Layout.of(options.gpus)
    settings = settings_of(options.config, workers=layout.policy, gpus=options.gpus)
    checkpoint = _checkpoint(options, settings)
    deaths = Deaths(options.kill, partial(console.print, soft_wrap=True))
    files = [folder / "timeline.html", folder / "timeline.json"] if options.timeline else []
    clock = StartClock()
    with ExitStack() as stack:
        clusters = _enter_clusters(stack, layout, clock)
        record = None
        if files:
            record = stack.enter_context(timeline(html=files[0], trace=files[1]))
            clock.draw = record.span
        with clock.phase("environments"):
            prepare_environment(policy_kind, clusters[0], console)
            generator_kind = choose_generator(options, clusters[1], console)
        settings["generator"] = generator_kind.name
        if checkpoint is not None:
            checkpoint.check(settings)
        with clock.phase("weight directory"):
            directory = stack.enter_context(WeightDirectory.start())
        start_of_groups = ONE_BY_ONE if layout.takes_turns else AT_ONCE
        with clock.phase(start_of_groups):
            phases = PhaseManager(*MEMBERS) if layout.takes_turns else None
            starting = start_groups(
                clusters,
                policy_kind,
                generator_kind,
                config=options.config,
                directory=directory,
                deaths=deaths,
                phases=phases,
            )
            policy, generators = stack.enter_context(starting)
            groups = [policy, generators.group]
        start = time.perf_counter()
        for cluster in dict.fromkeys(clusters):
            cluster.print_all_worker_groups(
                [one for one, own in zip(groups, clusters, strict=True) if own is cluster]
            )
        crew = Crew(options.config, policy, generators, directory, deaths, phases)
        if record is not None:
            crew.on_update = record.add
        every = options.checkpoint_every if options.max_staleness is None else None
        loop = GrpoLoop(options.config, crew, folder / CHECKPOINTS, settings, every)
        with clock.phase("warm-up" if checkpoint is None else "checkpoint"):
            _prepare(loop, checkpoint, console)
        rows = start_rows(clock.seconds, [group.startup for group in groups], among=start_of_groups)
        console.print(start_table(rows))
        paces: list[Pace] = []
        if options.max_staleness is None:
            history = _train(loop, console).history
        else:
            history, paces = _train_both(loop, crew, options.max_staleness, console)
        about = _about(options, generator_kind, time.perf_counter() - start)
        files += write_report(history, {**about, "start_s": dict(rows)}, folder)  # whatever the end is like
        if paces:
            files += write_comparison(paces, about, folder)
        policy.call("close").get_results(timeout=30)
    console.print(history.summary)
    for file in files:
        console.print(str(file), soft_wrap=True)


def _enter_clusters(stack: ExitStack, layout: Layout, clock: StartClock) -> Clusters:
    """A Ray of this run's own, and the bundles of the policy and of the generators."""
    with clock.phase("Ray"):
        stack.enter_context(init_ray("local", num_cpus=layout.processes + VERIFIER_CPUS))

    def bundles(count: int, name: str, groups: int) -> RayVirtualCluster:
        how = {"use_gpus": layout.has_gpus, "num_gpus_per_node": count, "name": name}
        return stack.enter_context(RayVirtualCluster([count], max_colocated_worker_groups=groups, **how))

    with clock.phase("bundles"):
        try:
            if layout.is_shared:
                both = bundles(layout.policy, "grpo", GROUPS)
                return both, both
            return bundles(layout.policy, "grpo-policy", 1), bundles(layout.generators, "grpo-generators", 1)
        except ClusterError as error:
            raise ExampleError(f"no room for --gpus {layout.gpus}: {error}") from error


def _checkpoint(options: Options, settings: Mapping[str, Any]) -> Checkpoint | None:
    """What to go on from, if anything: seen to be of this run before any time is spent."""
    if not options.resume:
        return None
    checkpoint = Checkpoint.load(options.output / CHECKPOINTS)
    checkpoint.check(settings)
    if checkpoint.step > (steps := options.config.grpo.steps):
        raise ExampleError(
            f"the checkpoint is at step {checkpoint.step}, beyond the {steps} that are asked for"
        )
    if late := [at for at in options.kill.values() if at <= checkpoint.step]:
        raise ExampleError(
            f"the checkpoint is at step {checkpoint.step}: nobody can be killed in round {late[0]}"
        )
    return checkpoint


def _prepare(loop: GrpoLoop, checkpoint: Checkpoint | None, console: Console) -> None:
    """The supervised phase, unless that is done."""
    if checkpoint is not None:
        loop.restore(checkpoint)
        console.print(f"resumed at step {loop.step}, with weights of version {loop.crew.version}")
        return
    with console.status("warm-up") as status:
        loss = loop.warm_up(lambda steps, loss: status.update(f"warm-up: step {steps}, loss {loss:.3f}"))
    console.print(f"warm-up: {loop.config.warmup.steps} supervised steps, loss {loss:.2f}")


def _train(loop: GrpoLoop | AsyncGrpoLoop, console: Console) -> Stopwatch:
    """The rounds of GRPO, shown as they go."""
    with RunDisplay(console, loop.history, loop.config.grpo.steps) as display:
        watch = Stopwatch(loop.history, display.update)
        loop.run(watch)
    console.print(loop.history.time_split())
    return watch


def _train_both(
    loop: GrpoLoop, crew: Crew, max_staleness: int, console: Console
) -> tuple[History, list[Pace]]:
    """Rounds in turns, and from where these began others that overlap; the history of the latter."""
    config, begin = loop.config.grpo, crew.state()
    console.print("in turns:")
    turns = in_turns(_train(loop, console), config.prompts_per_step, config.samples_per_prompt)
    crew.restore(begin, 0, 1)
    other = AsyncGrpoLoop(loop.config, crew, max_staleness)
    console.print(f"with generation going on meanwhile, samples {behind(max_staleness)}:")
    watch = _train(other, console)
    paces = [
        turns,
        overlapped(watch, max_staleness, config.samples_per_prompt, other.busy_s(), other.counts()),
    ]
    other.close()
    console.print(comparison(paces))
    return watch.history, paces


def _about(options: Options, generator: WorkerKind, seconds: float) -> dict[str, Any]:
    """What a reader of the report needs to know about the run."""
    config = options.config
    parts = [
        f"sort {config.digits} digits",
        f"{generator.name} generator",
        str(Layout.of(options.gpus)),
        f"seed {config.seed}",
        *([] if config.synchronise else ["generator never synchronised"]),
        *([] if options.max_staleness is None else [behind(options.max_staleness)]),
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
