"""The vLLM generator, in an environment of its own.

Who asks what the class is like, as a group does before it starts, need not import vLLM, which takes 10 s.
"""

from generation.engine import Engine
from generation.worker import GenerationWorker
from raycrew.worker_groups import heavy_imports


class VllmWorker(GenerationWorker):
    """Generates with vLLM."""

    def create_engine(self, seed: int) -> Engine:
        """An engine that this process steps."""
        with heavy_imports():
            from generation.vllm_engine import VllmEngine

        return VllmEngine(self.options, seed)
