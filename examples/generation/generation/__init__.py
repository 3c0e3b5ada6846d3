"""Generation workers: what a driver needs of them; it imports neither vLLM nor transformers."""

from generation.checking import WeightReport
from generation.errors import (
    AsleepError,
    EngineFailedError,
    GenerationError,
    PromptError,
    RefusedError,
    SamplingError,
)
from generation.group import Generators, start_generators
from generation.metrics import GenerationMetrics
from generation.openai.options import EndpointOptions
from generation.options import EngineOptions
from generation.prompts import Limits
from generation.sampling import Sampling

__all__ = [
    "AsleepError",
    "EndpointOptions",
    "EngineFailedError",
    "EngineOptions",
    "GenerationError",
    "GenerationMetrics",
    "Generators",
    "Limits",
    "PromptError",
    "RefusedError",
    "Sampling",
    "SamplingError",
    "WeightReport",
    "start_generators",
]
