"""How tensors get to the workers of an engine."""

import pytest
import torch

from raycrew.tensor_transport import UnsupportedTensorError
from raycrew.tensor_transport.integrations.vllm import _staging
from raycrew.tensor_transport.integrations.vllm._staging import OwnProcess, Reader, SharedMemory
from raycrew.tensor_transport.transports import SharedMemoryTransport


class Counted(SharedMemoryTransport):
    """Counts what is offered, and what is mapped."""

    offered = mapped = 0

    def offer(self, data, *, folded=False):
        Counted.offered += 1
        return super().offer(data, folded=folded)

    def reserve(self, size_bytes):
        Counted.offered += 1
        return super().reserve(size_bytes)

    def map(self, offer, *, timeout_s=None):
        Counted.mapped += 1
        return super().map(offer, timeout_s=timeout_s)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(_staging, "SharedMemoryTransport", Counted)
    Counted.offered = Counted.mapped = 0
    return Counted


def tensors(value):
    """Of several dtypes, one of no element and one of a single one, and one that is not contiguous."""
    return [
        ("odd", torch.full((3, 5), value, dtype=torch.bfloat16)),
        ("none", torch.empty(0, 4)),
        ("one", torch.tensor(value, dtype=torch.int64)),
        ("turned", torch.arange(12.0).reshape(3, 4).t() + value),
        ("bytes", torch.full((7,), value, dtype=torch.uint8)),
        ("bit", torch.tensor([True, False, True])),
        *((f"layer {i}", torch.full((17,), float(value + i))) for i in range(20)),
    ]


@pytest.mark.parametrize("stage", [OwnProcess, SharedMemory])
def test_tensors_arrive_as_they_are(stage):
    stage, reader = stage(), Reader()
    for value in (1, 2):
        with stage.lend(tensors(value)) as told:
            found = dict(reader.read(told))
        assert list(found) == [name for name, _ in tensors(value)]
        for name, expected in tensors(value):
            assert found[name].dtype == expected.dtype and torch.equal(found[name], expected)
        del found
    with stage.lend([]) as told:
        assert dict(reader.read(told)) == {}
    reader.close()
    stage.close()


def test_a_model_is_offered_as_a_whole_in_the_same_memory_each_time_and_mapped_once_by_each_worker(counted):
    stage, readers, arenas = SharedMemory(), [Reader(), Reader()], set()
    for value in range(3):
        with stage.lend(tensors(value)) as told:
            arenas.add(told["spot"][0])
            for reader in readers:
                assert len(list(reader.read(told))) == len(tensors(value))
    assert (counted.offered, counted.mapped, len(arenas)) == (3, 6, 1)
    for each in (*readers, stage):
        each.close()


def test_what_was_read_stays_as_it_was_while_somebody_holds_it():
    stage, reader = SharedMemory(), Reader()
    with stage.lend(tensors(1)) as told:
        held = dict(reader.read(told))["layer 0"]
    with stage.lend(tensors(2)) as told:
        assert torch.equal(dict(reader.read(told))["layer 0"], torch.full((17,), 2.0))
    assert torch.equal(held, torch.full((17,), 1.0))
    del held
    reader.close()
    stage.close()


def test_nothing_stays_of_tensors_that_have_no_bytes():
    stage = SharedMemory()
    weights = [*tensors(1), ("far", torch.empty(3, device="meta"))]
    with pytest.raises(UnsupportedTensorError, match="far"), stage.lend(weights):
        raise AssertionError("it is lent")
    with stage.lend(tensors(1)) as told:
        assert len(told["tensors"]) == len(tensors(1))
    stage.close()
