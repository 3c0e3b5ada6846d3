"""Generation workers of vLLM get their weights over a route, whose bytes all processes of an engine load."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

from generation_routes import (  # noqa: E402
    check_death_between,
    check_death_within,
    check_updates,
    routed_stage,
)

TRANSPORTS = ["shared_memory", "gloo"]


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_computes_what_the_trainer_does_however_its_weights_came(local_ray, size):
    with routed_stage("vllm", size, options={"tensor_parallel": size}) as stage:
        for transport in TRANSPORTS:
            check_updates(stage, transport)


@pytest.mark.hostile
def test_an_engine_that_ends_with_its_worker_is_replaced_and_joins_again(local_ray):
    with routed_stage("vllm", 2, options={"tensor_parallel": 2}) as stage:
        check_death_within(stage, "gloo")
        check_death_between(stage, "shared_memory")


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "devices"), [("cuda_ipc", 1), ("nccl", 2)])
def test_also_from_device_to_device(local_ray, transport, devices):
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    torch.cuda.set_device(devices - 1)  # the engine has the first one
    with routed_stage("vllm", use_gpus=True) as stage:
        check_updates(stage, transport, device="cuda")
