"""Weights that change while it is told what changed in them: seen, refused, and told right the next time."""

import pytest
import torch
from models import assert_same

from raycrew.tensor_transport import DeltaSource, DeltaTarget, WeightPublisher
from raycrew.tensor_transport.errors import SourceChangedError, TransportError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights.deltas import _source

pytestmark = pytest.mark.hostile


def model():
    return {f"w{i}": torch.full((100,), float(i)) for i in range(6)}


def of_mapping(weights, write):
    class Written(dict):
        def items(self):
            for name, tensor in super().items():
                write(name)
                yield name, tensor

    return Written(weights)


def of_detached(weights, write):
    for name, tensor in weights.items():
        write(name)
        yield name, tensor.detach()


def of_views_of_numpy(weights, write):
    for name, tensor in weights.items():
        write(name)
        yield name, torch.from_numpy(tensor.numpy())


def kept_up(source, target, weights):
    target.load(source.encode(weights).tensors)
    source.commit()
    target.committed(0, ())


@pytest.mark.parametrize("give", [of_mapping, of_detached])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t.numpy().__setitem__(7, 9.5)])
def test_a_write_to_what_was_told_is_seen(give, full, write):
    weights, source = model(), DeltaSource()
    held = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    target = DeltaTarget(held)
    kept_up(source, target, weights)
    weights["w3"] += 3
    publisher = WeightPublisher(InProcessByteStore())

    def step(name):
        if name == "w4":
            write(weights["w1"])

    with pytest.raises(SourceChangedError, match="'w1'") as caught:
        update = source.encode(give(weights, step), full=full)
        publisher.publish(update.tensors, partial=update.partial)
    assert caught.value.names == ("w1",)
    with pytest.raises(TransportError, match="no update to commit"):
        source.commit()
    kept_up(source, target, weights)
    assert_same(held, weights)


@pytest.mark.parametrize("full", [True, False])
def test_a_write_while_a_tensor_is_told_is_seen(monkeypatch, full):
    weights, source = model(), DeltaSource()
    held = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    kept_up(source, target := DeltaTarget(held), weights)
    encode = _source.encode_delta

    def written(*args, **options):
        delta = encode(*args, **options)
        weights["w5"] += 1
        return delta

    with monkeypatch.context() as patch, pytest.raises(SourceChangedError, match="'w5'"):
        patch.setattr(_source, "encode_delta", written)
        list(source.encode(of_views_of_numpy(weights, bool), full=full).tensors)
    kept_up(source, target, weights)
    assert_same(held, weights)


def test_memory_that_an_iterator_fills_anew_is_its_own():
    source, target = DeltaSource(), DeltaTarget(held := {n: torch.zeros_like(t) for n, t in model().items()})
    buffer = torch.empty(130)

    def gathered(weights):
        for i, (name, tensor) in enumerate(weights.items()):
            yield name, buffer[5 * i : 5 * i + 100].copy_(tensor)

    for number in range(3):
        weights = {name: tensor + number for name, tensor in model().items()}
        target.load(source.encode(gathered(weights)).tensors)
        source.commit()
        assert_same(held, weights)


def test_memory_that_is_given_back_meanwhile_is_no_change():
    weights, source = model(), DeltaSource()

    def gathered():
        for name, tensor in weights.items():
            whole = tensor.clone()
            yield name, whole
            whole.data = torch.empty(0)

    assert len(list(source.encode(gathered()).tensors)) == 6
    source.commit()
