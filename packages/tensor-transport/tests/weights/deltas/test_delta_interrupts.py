"""Interrupts between the lines: a tensor was written, and nobody noted how that is undone."""

import pytest
import torch

from raycrew.tensor_transport import DeltaSource, DeltaTarget
from raycrew.tensor_transport.errors import BaseVersionError
from raycrew.tensor_transport.weights.deltas import Delta

pytestmark = pytest.mark.hostile


@pytest.fixture
def weights():
    return {name: torch.arange(1000.0) for name in ("first", "second", "third")}


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts whoever applies the so many-th delta, as soon as that is written."""
    apply = Delta.apply

    def interrupt(at):
        left = [at]

        def written(self, memory, *, verify=True):
            undo = apply(self, memory, verify=verify)
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return undo

        monkeypatch.setattr(Delta, "apply", written)

    return interrupt


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_a_source_was_interrupted_in_is_told_in_full(weights, interrupted, verify, at):
    source, held = DeltaSource(), {name: torch.zeros(1000) for name in weights}
    target = DeltaTarget(held, verify=verify)
    target.load(source.encode(weights).tensors)
    source.commit()
    for tensor in weights.values():
        tensor[7] += 1
    interrupted(at)
    with pytest.raises(KeyboardInterrupt):
        source.encode(weights)
    target.load(source.encode(weights).tensors)
    source.commit()
    assert all(torch.equal(held[name], weights[name]) for name in weights)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_a_target_that_was_interrupted_holds_no_version_and_says_so(weights, interrupted, verify, at, again):
    source, held = DeltaSource(), {name: torch.zeros(1000) for name in weights}
    target = DeltaTarget(held, verify=verify)
    target.load(source.encode(weights).tensors)
    source.commit()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor[7] += 1
    told = source.encode(weights).tensors
    interrupted(at)
    with pytest.raises(KeyboardInterrupt):
        target.load(told)
    if again:
        target.revert()
    assert target.version is None
    source.abort()
    with pytest.raises(BaseVersionError, match="this receiver holds nothing of it"):
        target.load(source.encode(before).tensors)
    target.load(source.encode(before, full=True).tensors)
    assert target.version and all(torch.equal(held[name], before[name]) for name in before)


def test_a_return_that_was_interrupted_can_be_gone_on_with(weights, interrupted):
    source, held = DeltaSource(), {name: torch.zeros(1000) for name in weights}
    target = DeltaTarget(held)
    target.load(source.encode(weights).tensors)
    source.commit()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor[7] += 1
    target.load(source.encode(weights).tensors)
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        target.revert()
    assert target.version is None, "it is a mixture"
    target.revert()
    assert target.version == 1 and all(torch.equal(held[name], before[name]) for name in before)
