"""Requests on their way through an engine, and what was made of them so far."""

from collections.abc import Callable
from dataclasses import dataclass, field

from generation.engine import Piece, Request
from generation.samples import Added, FinishReason, Sample

Sink = Callable[[Request, Sample | BaseException], None]
"""Where a sample goes when it has ended, or what became of it instead; called in the engine's thread."""
Listener = Callable[[Request, Added], None]
"""Where that goes which a step adds to a sample, before the sample itself; called in the engine's thread."""


@dataclass(slots=True)
class Track:
    """A request on its way."""

    request: Request
    sink: Sink
    listener: Listener | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, piece: Piece, version: int) -> None:
        """Add what a step has made."""
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += [version] * len(piece.tokens)
        if self.listener is not None and piece.tokens:
            self.listener(self.request, Added(piece.tokens, piece.logprobs, version))

    def ended(self, reason: FinishReason) -> Sample:
        """The sample as far as it has come."""
        request = self.request
        found = self.tokens, self.logprobs, self.versions
        return Sample(request.prompt_index, request.sample_index, *found, reason)


@dataclass(slots=True)
class Counts:
    """What was done since the engine was made."""

    tokens: int = 0
    seconds: float = 0.0
    finished: int = 0
    aborted: int = 0
