"""Whether an engine computes what the trainer's own forward pass does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raycrew.tensor_transport.errors import TransportError


class WeightCheckError(TransportError):
    """An engine computes something else than the trainer's forward pass: its weights are not the trainer's.

    Attributes:
        row: The first reference that differs.
        difference: The largest difference of log-probabilities, inf where tokens differ.
    """

    def __init__(self, message: str, *, row: int = 0, difference: float = float("inf")) -> None:
        super().__init__(message)
        self.row = row
        self.difference = difference


@dataclass(frozen=True, slots=True)
class GreedyReference:
    """What the trainer's forward pass makes of a prompt, taking the likeliest token each time.

    Attributes:
        prompt: Token ids.
        tokens: The tokens that follow.
        logprobs: Log-probability of each of them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def greedy_references(
    logits: Callable[[torch.Tensor], torch.Tensor], prompts: Sequence[Sequence[int]], tokens: int = 8
) -> list[GreedyReference]:
    """References for `VllmWeights.check`, made where the trainer's model is.

    Args:
        logits: Token ids, int64 [1, length] -> logits, [1, length, vocabulary]: for a transformers model
            `lambda ids: model(ids).logits`.
        prompts: Token ids; a few short ones will do.
        tokens: How many tokens follow each.
    """
    with torch.no_grad():
        return [_reference(logits, tuple(prompt), tokens) for prompt in prompts]


def _reference(
    logits: Callable[[torch.Tensor], torch.Tensor], prompt: tuple[int, ...], tokens: int
) -> GreedyReference:
    ids, found = list(prompt), []
    for _ in range(tokens):
        logprobs = logits(torch.tensor([ids]))[0, -1].float().log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        found.append(float(logprobs[ids[-1]]))
    return GreedyReference(prompt, tuple(ids[len(prompt) :]), tuple(found))


def compare_greedy(
    references: Sequence[GreedyReference],
    answers: Sequence[tuple[Sequence[int], Sequence[float]]],
    tolerance: float,
) -> float:
    """The largest difference of log-probabilities between references and an engine's (tokens, logprobs).

    Raises:
        WeightCheckError: Tokens differ, or a log-probability by more than `tolerance`.
    """
    largest = 0.0
    for row, (reference, (tokens, logprobs)) in enumerate(zip(references, answers, strict=True)):
        if tuple(tokens) != reference.tokens:
            raise WeightCheckError(
                f"prompt {row}: the engine goes on with {list(tokens)}, the trainer with "
                f"{list(reference.tokens)}",
                row=row,
            )
        pairs = zip(logprobs, reference.logprobs, strict=True)
        differences = [abs(mine - theirs) for mine, theirs in pairs]
        difference = max(differences, default=0.0)
        if not all(each <= tolerance for each in differences):  # What is not a number does not agree.
            raise WeightCheckError(
                f"prompt {row}: log-probabilities differ by {difference:.2g}, more than {tolerance:.2g}",
                row=row,
                difference=difference,
            )
        largest = max(largest, difference)
    return largest
