"""What a generator tells of its work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationMetrics:
    """A generator at a moment.

    Attributes:
        state: "awake", "paused", "asleep", or "failed" where the engine raised: `wake()` makes a new one.
        weight_version: Of the weights it holds; 0 for those it was made with, None where it holds none.
        running: Requests that tokens are generated for.
        waiting: Requests that wait for room, or for the end of a pause.
        kv_cache_use: Used share of the memory for keys and values, 0 to 1.
        tokens: Generated since the engine was made.
        tokens_per_s: Of the time in which the engine generated.
        finished: Samples that ended by themselves.
        aborted: Samples that were aborted.
    """

    state: str
    weight_version: int | None
    running: int = 0
    waiting: int = 0
    kv_cache_use: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    finished: int = 0
    aborted: int = 0
