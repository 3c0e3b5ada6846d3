"""A generator whose engine starts processes on bundles that it is told of, as vLLM's executor `ray` does."""

import json
import os

import ray
from generation_echo import EchoEngine
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from generation.worker import GenerationWorker


@ray.remote
class Part:
    def where(self):
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class SpreadEngine(EchoEngine):
    """Its parts are alive as long as it is."""

    def __init__(self):
        super().__init__()
        group, options = ray.util.get_current_placement_group(), {"num_cpus": 0}
        options["num_gpus"] = float(os.environ["VLLM_RAY_PER_WORKER_GPUS"])
        self.parts = [
            Part.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, int(index)), **options
            ).remote()
            for index in os.environ["VLLM_RAY_BUNDLE_INDICES"].split(",")
        ]
        self.places = ray.get([part.where.remote() for part in self.parts], timeout=60)

    def explain(self):
        own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return json.dumps({"places": self.places, "own": own, "hidden": hidden})


class SpreadWorker(GenerationWorker):
    def create_engine(self, seed):
        return SpreadEngine()
