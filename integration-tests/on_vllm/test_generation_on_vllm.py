"""The generation worker of vLLM does what every generation worker does."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long]

from generation_conformance import Conformance  # noqa: E402
from generation_stage import local_stage  # noqa: E402

from generation.vllm_worker import VllmWorker  # noqa: E402


class TestVllm(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls):
        with local_stage(VllmWorker) as made:
            yield made
