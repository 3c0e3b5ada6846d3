"""A trainer and an engine of vLLM on the same bundles: the engine ends when it sleeps."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

from colocated_turns import PROMPTS, both_on_one_bundle, check_marks, check_steps, kill  # noqa: E402
from generation_stage import MODEL  # noqa: E402

from raycrew.cluster_core.testing import connected  # noqa: E402

LARGE = {**MODEL, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
WEIGHTS_BYTES = 4 * 8 * (3 * 1024 * 256 + 3 * 256 * 256)


def test_an_engine_makes_room_for_a_trainer_and_is_made_anew_with_its_weights(local_ray_session, tmp_path):
    with connected(local_ray_session), both_on_one_bundle("vllm", LARGE, tmp_path) as both:
        check_steps(both, (1, 2))
        check_marks(both.phases.report(), 3 * WEIGHTS_BYTES)
        with both.phases.turn("generate"):
            assert "to sleep is to end the engine with its processes" in both.generators.call("explain")[0]
        kill(both.generators.group)
        assert both.step(PROMPTS, {"max_tokens": 2})[1] == {3}, "who replaces it has current weights"


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_on_a_device_gives_its_memory_up_and_stays(local_ray_session, tmp_path, level):
    with (
        connected(local_ray_session),
        both_on_one_bundle("vllm", LARGE, tmp_path, use_gpus=True, sleep_level=level) as both,
    ):
        check_steps(both, (1, 2))
        ranks = {name: use.ranks for name, use in both.phases.report().phases.items()}
        assert ranks["train"]["train"][0].device_bytes > ranks["generate"]["train"][0].device_bytes
        with both.phases.turn("generate"):
            assert f"level {level}" in both.generators.call("explain")[0]
