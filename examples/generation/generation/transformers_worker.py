"""The plain generator, for tests and machines without vLLM; like `vllm_worker` it imports its engine late."""

from generation.engine import Engine
from generation.worker import GenerationWorker
from raycrew.worker_groups import heavy_imports


class TransformersWorker(GenerationWorker):
    """Generates with transformers."""

    def create_engine(self, seed: int) -> Engine:
        """A model in this process."""
        with heavy_imports():
            from generation.transformers_engine import TransformersEngine

        return TransformersEngine(self.options, seed)
