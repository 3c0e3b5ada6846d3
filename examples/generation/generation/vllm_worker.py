"""The vLLM generator, in an environment of its own.

Who asks what the class is like, as a group does before it starts, need not import vLLM, which takes 10 s.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from generation.engine import Engine
from generation.worker import GenerationWorker
from raycrew.worker_groups import heavy_imports

COMPILER = "torch._inductor.lowering"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Where nothing is compiled, keep vLLM from importing torch's compiler only to patch it.

    Whoever wants it afterwards imports it as ever.
    """
    is_kept_away = os.environ.get("TORCHDYNAMO_DISABLE") == "1" and COMPILER not in sys.modules
    if is_kept_away:
        sys.modules[COMPILER] = None  # type: ignore[assignment]  # as for what is not installed
    try:
        yield
    finally:
        if is_kept_away:
            del sys.modules[COMPILER]


class VllmWorker(GenerationWorker):
    """Generates with vLLM."""

    def create_engine(self, seed: int) -> Engine:
        """An engine that this process steps."""
        with heavy_imports():
            with without_compiler():
                import vllm  # noqa: F401 - what it imports first
            from generation.vllm_engine import VllmEngine

        return VllmEngine(self.options, seed)
