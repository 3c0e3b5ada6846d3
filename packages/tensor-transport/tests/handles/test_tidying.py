"""Calls that carry no tensor give memory back, too."""

import pytest

from raycrew.tensor_transport import NodeMemoryBackend, ShardRegistry, TensorArguments


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_a_call_without_tensors_takes_memory_back(monkeypatch, call):
    collected = []
    monkeypatch.setattr(NodeMemoryBackend, "collect", lambda self, every_s: collected.append(every_s))
    arguments = TensorArguments(registry=ShardRegistry(NodeMemoryBackend()))
    assert getattr(arguments, call)({"step": 5}) == {"step": 5}
    assert len(collected) == 1
