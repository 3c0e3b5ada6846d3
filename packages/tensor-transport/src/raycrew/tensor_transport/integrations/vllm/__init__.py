"""Weights into a running vLLM, through its own interface for weight transfer.

vLLM itself is imported only in processes that run it: this module can be imported anywhere.
"""

from raycrew.tensor_transport.integrations.vllm._checking import (
    GreedyReference,
    WeightCheckError,
    compare_greedy,
    greedy_references,
)
from raycrew.tensor_transport.integrations.vllm._delivery import EngineLoader, EngineLoadError
from raycrew.tensor_transport.integrations.vllm._engines import Requests
from raycrew.tensor_transport.integrations.vllm._plugin import BACKEND, register
from raycrew.tensor_transport.integrations.vllm._weights import VllmWeights

__all__ = [
    "BACKEND",
    "EngineLoadError",
    "EngineLoader",
    "GreedyReference",
    "Requests",
    "VllmWeights",
    "WeightCheckError",
    "compare_greedy",
    "greedy_references",
    "register",
]
