"""Whether a generator computes what the trainer's own forward pass does, and has the weights it was sent."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from generation.calls import Asked, admitted, samples_of
from generation.errors import GenerationError
from generation.life import EngineLife
from generation.samples import Sample
from generation.sampling import Sampling
from raycrew.tensor_transport import BatchedDataDict
from raycrew.tensor_transport.integrations.vllm import GreedyReference, WeightCheckError, compare_greedy


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What a generator makes of prompts that the trainer has gone on with, too.

    Attributes:
        version: Of the weights that chose its tokens.
        difference: The largest difference of log-probabilities, in each prompt up to the first token that is
            another one, which may be as likely.
        first_other: Prompt and position of the first token that the trainer does not have; None without one.
        digest: Of the weights that are loaded; None where the engine has them in another form.
    """

    version: int
    difference: float
    first_other: tuple[int, int] | None
    digest: str | None


async def check_weights(
    life: EngineLife, references: Sequence[GreedyReference], digest: str | None, tolerance: float | None
) -> WeightReport:
    """See `GenerationWorker.check`."""
    samples = await _greedy(life, references)
    loop, version_of = life.awake.loop, life.awake.version
    version, own = await asyncio.wrap_future(loop.call(lambda: (version_of(), loop.engine.digest())))
    if others := {version for sample in samples for version in sample.versions} - {version}:
        raise GenerationError(f"weights of version {version} came while those of {others} were checked")
    if digest is not None and own not in (None, digest):
        raise WeightCheckError(f"the digest of the weights is {own}, and {digest} of those that were sent")
    answers = [(sample.tokens, sample.logprobs) for sample in samples]
    if tolerance is not None:
        compare_greedy(references, answers, tolerance)
    return WeightReport(version, *_compared(references, samples), own)


async def _greedy(life: EngineLife, references: Sequence[GreedyReference]) -> list[Sample]:
    """What the engine goes on with, reference by reference."""
    if not references or not all(reference.tokens for reference in references):
        raise ValueError("there is nothing to compare: references need tokens")
    batch = BatchedDataDict({"prompt_ids": [list(reference.prompt) for reference in references]})
    lengths = [len(reference.tokens) for reference in references]
    how = Sampling(temperature=0, max_tokens=max(lengths), ignore_eos=True)
    loop, requests = await admitted(life, Asked(batch, how, None, None))
    requests = [replace(one, max_tokens=min(one.max_tokens, lengths[one.prompt_index])) for one in requests]
    async with aclosing(samples_of(loop, requests)) as ended:
        found = {sample.prompt_index: sample async for _, sample in ended}
    samples = [found[row] for row in range(len(lengths))]
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        if (n := len(sample.tokens)) < length:
            raise GenerationError(f"prompt {row} ended after {n} of {length} tokens ({sample.finish_reason})")
    return samples


def _compared(
    references: Sequence[GreedyReference], samples: Sequence[Sample]
) -> tuple[float, tuple[int, int] | None]:
    """Largest difference, and first other token."""
    largest, first = 0.0, None
    for row, (reference, sample) in enumerate(zip(references, samples, strict=True)):
        same = [mine == theirs for mine, theirs in zip(sample.tokens, reference.tokens, strict=True)]
        at = [*same, False].index(False)
        if at < len(same):
            first = first or (row, at)
        for mine, theirs in zip(sample.logprobs[: at + 1], reference.logprobs[: at + 1], strict=True):
            largest = max(largest, math.inf if math.isnan(mine - theirs) else abs(mine - theirs))
    return largest, first
