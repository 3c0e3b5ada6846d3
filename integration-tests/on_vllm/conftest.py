import contextlib
import gc
import os
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None and not os.environ.get("REQUIRE_VLLM"):
    collect_ignore_glob = ["test_*.py"]  # The session `vllm` installs it.
else:  # Before vLLM is imported, and for the processes that it starts.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }

KINDS = ("separate embeddings", "tied embeddings, biases")


@pytest.fixture(scope="module", params=KINDS)
def engine(request):
    """One whose worker is this process."""
    from vllm_engines import start

    llm = start(request.param)
    llm.kind = request.param
    yield llm
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


@pytest.fixture
def store():
    from vllm_engines import ARENA_BYTES

    from raycrew.tensor_transport.transports import SharedMemoryTransport

    with SharedMemoryTransport(arena_bytes=ARENA_BYTES) as transport:
        yield transport


@pytest.fixture
def directory():
    from raycrew.tensor_transport import WeightDirectory

    return WeightDirectory.local()


@pytest.fixture
def trainer(engine, store, directory):
    from vllm_engines import Trainer

    with contextlib.closing(Trainer(engine.kind, store, directory)) as trainer:
        yield trainer


@pytest.fixture
def loads(monkeypatch):
    """An entry for each time that a model is loaded in a pause."""
    from raycrew.tensor_transport.integrations.vllm._delivery import EngineLoader

    seen, staged = [], EngineLoader.staged

    def looking(*args):
        seen.append(True)
        return staged(*args)

    monkeypatch.setattr(EngineLoader, "staged", looking)
    return seen


@pytest.fixture
def weights(engine, store, directory, trainer):
    """Those of an engine that holds version 1, of seed 1, and packs the next ones ahead."""
    from vllm_ahead import receiver

    with receiver(engine, store, directory) as weights:
        weights.apply_weights(trainer.publish(1).version)
        yield weights
