"""Calls that carry no tensor give memory back, too."""

import pytest
import torch

from raycrew.tensor_transport import NodeMemoryBackend, RTensor, ShardRegistry, TensorArguments
from raycrew.tensor_transport._handles import arguments
from raycrew.tensor_transport.testing import InProcessBackend


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_a_call_without_tensors_takes_memory_back(monkeypatch, call):
    collected = []
    monkeypatch.setattr(NodeMemoryBackend, "collect", lambda self, every_s: collected.append(every_s))
    arguments = TensorArguments(registry=ShardRegistry(NodeMemoryBackend()))
    assert getattr(arguments, call)({"step": 5}) == {"step": 5}
    assert len(collected) == 1


def test_every_tensor_may_be_a_handle_and_none_is_smaller_than_nothing():
    registry = ShardRegistry(InProcessBackend())
    found = TensorArguments(min_bytes=0, registry=registry).encode({"x": torch.ones(1)})
    assert isinstance(found["x"], RTensor)
    with pytest.raises(ValueError, match="min_bytes must not be negative, got -1"):
        TensorArguments(min_bytes=-1, registry=registry)
    large, small = torch.ones(1 << 20), torch.ones(10)
    found = TensorArguments(registry=registry).encode([large, small])
    assert isinstance(found[0], RTensor) and found[1] is small


def test_workers_get_memory_of_their_own_unless_they_borrow(monkeypatch):
    given = []
    monkeypatch.setattr(arguments, "localize", lambda value, *_, borrow, **__: given.append(borrow))
    for transport in (TensorArguments(), TensorArguments(borrow=True)):
        transport.decode([])
    assert given == [False, True]
