"""Options of data-parallel training: checked where they are made, and seen on a training over gloo."""

import dataclasses
import math
import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from ddp_training import average_apart, differ, set_again, train_alone, train_in_two_processes
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from raycrew.tensor_transport.errors import NoTransportError, TransportError
from raycrew.tensor_transport.process_groups import communication
from raycrew.tensor_transport.process_groups.communication import (
    CommunicationSettings,
    PowerSGD,
    apply_communication,
)
from raycrew.tensor_transport.transports import member_facts

POWER = PowerSGD(rank=2, start_step=2)
VARIANTS = {
    "plain": CommunicationSettings(),
    "in turn": CommunicationSettings(asynchronous=False),
    "fp16": CommunicationSettings(gradient_compression="fp16"),
    "bf16": CommunicationSettings(gradient_compression="bf16"),
    "power": CommunicationSettings(gradient_compression=POWER),
    "power in turn": CommunicationSettings(gradient_compression=POWER, asynchronous=False),
}


@dataclasses.dataclass(frozen=True)
class Wishes:
    gradient_compression: bool = False
    asynchronous: bool = False


def test_a_groups_keywords_become_settings():
    assert CommunicationSettings.of(Wishes()) == CommunicationSettings(asynchronous=False)
    assert CommunicationSettings.of(Wishes(True, True)) == CommunicationSettings(gradient_compression="bf16")
    made = CommunicationSettings.of(Wishes(True), compression=POWER, backend="gloo")
    assert (made.gradient_compression, made.asynchronous, made.backend) == (POWER, False, "gloo")
    assert CommunicationSettings.of(Wishes(False, True), compression="fp16") == CommunicationSettings()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "mpi"}, ValueError),
        ({"gradient_compression": "int8"}, ValueError),
        ({"gradient_compression": True}, ValueError),
        ({"asynchronous": "yes"}, TypeError),
    ],
)
def test_settings_are_checked_where_they_are_made(options, error):
    with pytest.raises(error, match=next(iter(options))):
        CommunicationSettings(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rank": 0}, ValueError),
        ({"rank": 1.5}, TypeError),
        ({"start_step": 1}, ValueError),
        ({"start_step": True}, TypeError),
        ({"min_rate": 0}, ValueError),
        ({"min_rate": math.nan}, ValueError),
    ],
)
def test_power_sgd_is_checked_where_it_is_made(options, error):
    with pytest.raises(error, match=next(iter(options))):
        PowerSGD(**options)
    assert PowerSGD(start_step=0, error_feedback=False, warm_start=False).start_step == 0


def test_a_backend_that_can_not_be_had_says_why():
    assert CommunicationSettings(backend="gloo").resolve_backend() == "gloo"
    if not torch.cuda.is_available():
        assert CommunicationSettings().resolve_backend() == "gloo"
        with pytest.raises(NoTransportError, match=r"nccl: .*NCCL"):
            CommunicationSettings(backend="nccl").resolve_backend()


@pytest.mark.hostile
def test_a_backend_is_chosen_from_what_all_ranks_say():
    here = dataclasses.replace(member_facts(), unavailable={}, versions={"torch": "2", "nccl": "2"})
    first, second = (dataclasses.replace(here, gpus=(f"gpu{i}",)) for i in range(2))
    auto = CommunicationSettings()
    assert auto.resolve_backend([first, second]) == "nccl"
    for other in (
        dataclasses.replace(second, gpus=(), unavailable={"nccl": "no CUDA device is visible"}),
        first,
        dataclasses.replace(second, versions={"torch": "2", "nccl": "3"}),
    ):
        assert auto.resolve_backend([first, other]) == auto.resolve_backend([other, first]) == "gloo"
        with pytest.raises(NoTransportError, match="nccl"):
            CommunicationSettings(backend="nccl").resolve_backend([first, other])
    assert CommunicationSettings(backend="gloo").resolve_backend([first, second]) == "gloo"


def test_only_a_data_parallel_model_is_taken():
    with pytest.raises(TypeError, match="not a Linear"):
        apply_communication(torch.nn.Linear(2, 2), CommunicationSettings())


@pytest.mark.hostile
def test_gradients_are_averaged_in_the_group_of_the_model():
    first, second = train_in_two_processes(VARIANTS, train_alone, steps=5)
    for name in VARIANTS:
        assert abs(first[name][3] - second[name][3]) > 1e-6, f"{name}: each rank has data of its own"
    for found in (first, second):
        assert found["in turn"][3] == pytest.approx(found["plain"][3], abs=1e-9)


@pytest.mark.hostile
def test_ranks_that_compress_differently_are_told_so():
    for found in train_in_two_processes({"fp16": VARIANTS["fp16"], "power": VARIANTS["power"]}, differ):
        for message, ranks in found.values():
            assert "rank 0: None; rank 1: " in message and ranks == ["rank 0", "rank 1"]


@pytest.mark.hostile
def test_gradients_are_averaged_in_the_group_that_is_named():
    plain = {name: VARIANTS[name] for name in ("plain", "in turn", "fp16")}
    for rank, found in enumerate(train_in_two_processes(plain, average_apart)):
        assert found == dict.fromkeys(plain, 1.0 + rank)


@pytest.mark.hostile
def test_a_model_whose_gradients_are_compressed_already_stays_so_with_an_error():
    for found in train_in_two_processes({"fp16": VARIANTS["fp16"]}, set_again):
        assert "set it once, before the first step" in found["fp16"]


def test_in_turn_nobody_goes_on_before_a_bucket_has_travelled():
    travelling, gone_on = torch.futures.Future(), []
    waits = communication._in_turn(lambda state, bucket: travelling)
    thread = threading.Thread(target=lambda: gone_on.append(waits(None, None)))
    thread.start()
    thread.join(0.1)
    assert not gone_on
    travelling.set_result(torch.ones(1))
    thread.join(60)
    assert gone_on == [travelling]


def test_a_bucket_by_power_sgd_sets_out_when_the_one_before_has_arrived(monkeypatch):
    travelling = [torch.futures.Future(), torch.futures.Future()]
    set_out = queue.SimpleQueue()

    def exchange(state, bucket):
        set_out.put(bucket)
        return travelling[bucket]

    monkeypatch.setattr(powerSGD_hook, "powerSGD_hook", exchange)
    state, hook = communication._hook(POWER, None)
    assert hook(state, 0) is travelling[0] and set_out.get(timeout=60) == 0
    thread = threading.Thread(target=hook, args=(state, 1))
    thread.start()
    with pytest.raises(queue.Empty):
        set_out.get(timeout=0.1)
    travelling[0].set_result(torch.ones(1))
    assert set_out.get(timeout=60) == 1
    thread.join(60)
    assert not thread.is_alive()


def test_powersgd_on_the_cpu_of_a_process_that_sees_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    communication._check_device(SimpleNamespace(device_type="cuda"))
    with pytest.raises(TransportError, match="CUDA_VISIBLE_DEVICES=''"):
        communication._check_device(SimpleNamespace(device_type="cpu"))


def test_compressed_gradients_send_fewer_bytes_and_train_as_well():
    first, second = train_in_two_processes(VARIANTS)
    sent = {name: found[0] for name, found in first.items()}
    loss = {name: found[2] for name, found in first.items()}
    for name in VARIANTS:
        assert first[name][3] == pytest.approx(second[name][3], abs=1e-9), f"{name}: the ranks differ"
    assert sent["plain"] >= 60 * 4 * (32 * 256 + 256 * 256) / 2  # the kernel counted the gradients
    assert 0.45 <= sent["fp16"] / sent["plain"] <= 0.6
    assert 0.45 <= sent["bf16"] / sent["plain"] <= 0.6
    assert sent["power"] / sent["plain"] <= 0.2
    assert sent["in turn"] / sent["plain"] == pytest.approx(1, rel=0.1)
    assert loss["in turn"] == pytest.approx(loss["plain"], rel=1e-4)
    for name in ("fp16", "bf16", "power", "power in turn"):
        assert loss[name] == pytest.approx(loss["plain"], rel=0.1), name
