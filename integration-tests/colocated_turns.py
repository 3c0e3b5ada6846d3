"""A trainer and a generator of the colocated example, as tests start and kill them."""

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "generation"))

from colocated import colocated
from generation import EngineOptions
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory

SAMPLING = {"max_tokens": 4, "n": 2, "ignore_eos": True}
PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 10]])


@contextmanager
def both_on_one_bundle(worker, model, folder, use_gpus=False, sleep_level=None, **options):
    """The two of them, of a kind of generator, with a model."""
    engine = EngineOptions(model, sleep_level=sleep_level)
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([1], use_gpus=use_gpus, max_colocated_worker_groups=2) as cluster,
        colocated(cluster, directory, worker, engine, str(folder), **options) as both,
    ):
        yield both


def kill(group):
    """Kill the one worker of a group."""
    (pid,) = group.call("pid").get_results(timeout=60)
    os.kill(pid, signal.SIGKILL)
    return pid


def check_steps(both, steps):
    """Each step's samples are of the weights that the step before has made."""
    for step in steps:
        assert both.step(PROMPTS, SAMPLING)[1] == {step}
        assert both.phases.awake == "train"


def check_marks(report, size):
    """While the generator had its turn, the trainer had given its memory up."""
    awake, asleep = (report.phases[name].ranks["train"][0].host_bytes for name in ("train", "generate"))
    assert awake - asleep > 0.5 * size
    generating = report.phases["generate"]
    together = awake + generating.ranks["generate"][0].host_bytes
    assert generating.together.host_bytes < together - 0.5 * size
