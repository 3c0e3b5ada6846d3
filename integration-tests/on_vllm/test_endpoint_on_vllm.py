"""The endpoint of a generator of vLLM answers as that of every generator does."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

from endpoint_conformance import Answers, served  # noqa: E402

from generation.vllm_worker import VllmWorker  # noqa: E402


class TestVllm(Answers):
    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, tmp_path_factory):
        with served(VllmWorker, tmp_path_factory.mktemp("words")) as made:
            yield made
