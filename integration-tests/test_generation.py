"""Generation workers: the plain one in this process and on Ray, and what the driver's side does."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from generation_conformance import Conformance, check_what_waits_for_room
from generation_stage import EXAMPLE, MODEL, group_stage, local_stage

from generation import EngineOptions, RefusedError, start_generators
from generation.group import WORKERS
from generation.transformers_worker import TransformersWorker
from raycrew.cluster_core.testing import FakeCluster, connected


class TestTransformers(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls):
        with local_stage(TransformersWorker) as made:
            yield made

    def test_what_it_can_not_do_is_refused_by_name(self, stage):
        assert "no adapters" in stage.call("explain")
        with stage.refused(RefusedError, "no LoRA adapters"):
            stage.call("load_adapter", "tuned", "/nowhere")
        for options in ({"max_adapters": 1}, {"tensor_parallel": 2}):
            with pytest.raises(RefusedError, match="transformers engine"):
                TransformersWorker(EngineOptions(MODEL, **options))


def test_what_an_engine_has_no_room_for_waits():
    check_what_waits_for_room(TransformersWorker)


@pytest.mark.long
class TestTransformersOnRay(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls, local_ray_session):
        with connected(local_ray_session), group_stage("transformers", name_prefix="plain") as made:
            yield made


def test_the_executor_ray_is_refused_on_cpus_before_an_engine_starts():
    with pytest.raises(RefusedError, match="no executor 'ray' on CPUs"):
        start_generators(FakeCluster([2]), "vllm", EngineOptions(MODEL, executor="ray"))


@pytest.mark.parametrize(
    ("driver", "worker"),
    [("generation", name) for name in WORKERS.values()] + [("grpo.workers", "grpo.policy.PolicyWorker")],
)
def test_a_driver_has_the_classes_of_its_workers_and_neither_vllm_nor_transformers(driver, worker):
    """So that a group knows what they are like without a process that imports those."""
    module, _, name = worker.rpartition(".")
    code = (
        f"import sys, {driver}; held = hasattr(sys.modules['{module}'], '{name}')\n"
        "print(held, [m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    path = os.pathsep.join([str(EXAMPLE), str(EXAMPLE.with_name("grpo")), os.environ.get("PYTHONPATH", "")])
    told = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **told).stdout.strip() == "True []"
