"""A cluster on which the main example's groups run in this process, with a model that needs torch alone."""

import shutil
from contextlib import ExitStack, contextmanager

import ray
from grpo_runs import MODULES

from grpo import task, verification
from grpo.checkpoint import Checkpoint, settings_of
from grpo.config import GrpoConfig, ModelConfig, RunConfig, WarmupConfig
from grpo.crew import Crew
from grpo.deaths import Deaths
from grpo.loop import GrpoLoop
from grpo.workers import WorkerKind, start_groups
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory

CONFIG = RunConfig(
    digits=2,
    model=ModelConfig(hidden=32),
    warmup=WarmupConfig(steps=60, batch_size=64, learning_rate=2e-2),
    grpo=GrpoConfig(steps=4, prompts_per_step=8, samples_per_prompt=8, evaluate_every=2, held_out_prompts=20),
)
POLICY = WorkerKind("policy", "grpo_tiny.TinyPolicy", None, {"PYTHONPATH": MODULES})
GENERATOR = WorkerKind("tiny", "grpo_tiny.TinyGenerator", None, {"PYTHONPATH": MODULES})


class Stage:
    """A cluster on which the example runs, and where its checkpoints are."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.told = cluster, folder, []

    @contextmanager
    def crew(self, config=CONFIG, kill=(), deaths=Deaths, phases=None, kinds=(POLICY, GENERATOR)):
        deaths, clusters = deaths(dict(kill), self.told.append), (self.cluster, self.cluster)
        with WeightDirectory.start() as directory:
            how = {"config": config, "directory": directory, "deaths": deaths, "phases": phases}
            with start_groups(clusters, *kinds, **how) as (policy, generators):
                yield Crew(config, policy, generators, directory, deaths, phases)

    def run(self, crew, name, *, resume_from=None, keep_step=None):
        """A run's history; its checkpoint after `keep_step` is copied to where another run finds it."""
        folder = self.folder / name
        loop = GrpoLoop(crew.config, crew, folder, settings_of(crew.config), checkpoint_every=2)
        if resume_from is None:
            loop.warm_up(lambda *_: None)
        else:
            loop.restore(Checkpoint.load(self.folder / resume_from))

        def keep():
            if loop.step == keep_step:
                shutil.copytree(folder, self.folder / f"{name} {keep_step}", dirs_exist_ok=True)

        return loop.run(keep)


@contextmanager
def a_stage(folder):
    """A stage whose files are in this folder; a Ray is there already."""
    with ExitStack() as stack:
        for module in (task, verification):  # what verifies runs in processes that do not know the example
            ray.cloudpickle.register_pickle_by_value(module)
            stack.callback(ray.cloudpickle.unregister_pickle_by_value, module)
        with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster:
            yield Stage(cluster, folder)
