"""What a batch of prompts looks like, and which ones an engine can take."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from generation.errors import PromptError, SamplingError
from generation.sampling import Sampling
from raycrew.tensor_transport import RaggedTensor


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can take.

    Attributes:
        vocabulary_size: Token ids are below it.
        context_length: Most tokens of a prompt and its sample together.
    """

    vocabulary_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a batch.

    Attributes:
        index: Its number: the row, unless the batch has a column `prompt_index`.
        tokens: Its ids.
    """

    index: int
    tokens: tuple[int, ...]


def read_prompts(batch: Mapping[str, Any], limits: Limits) -> list[Prompt]:
    """The prompts of a batch, each of which the model can take.

    Args:
        batch: Has a column `prompt_ids`: a `RaggedTensor` or lists of ids, or integers of shape [rows,
            length], as a tensor or of numpy. Where rows are padded on the right, a column `prompt_lengths`
            tells each one's length (all of it without one). It may have a column `prompt_index`, int64,
            [rows].
        limits: What the model can take.

    Raises:
        PromptError: There are no prompts, or one is empty, has ids that the vocabulary lacks, or leaves no
            room for a token in the context; or their lengths or numbers can't be meant.
    """
    if "prompt_ids" not in batch:
        raise PromptError(f"the batch has no column 'prompt_ids'; it has {', '.join(batch) or 'none'}")
    rows = _rows_of(batch["prompt_ids"], batch.get("prompt_lengths"))
    if not rows:
        raise PromptError("the batch has no prompts")
    indices = _whole_numbers("prompt_index", batch.get("prompt_index", range(len(rows))))
    if len(indices) != len(rows):
        raise PromptError(f"the batch has {len(rows)} prompts, and {len(indices)} entries of prompt_index")
    if not all(-(1 << 63) <= index < 1 << 63 for index in indices):
        raise PromptError(f"prompt_index must fit int64, which {max(indices, key=abs)} does not")
    for row, tokens in enumerate(rows):
        check_prompt(tokens, limits, f"the prompt of row {row}")
    return [Prompt(index, tuple(tokens)) for index, tokens in zip(indices, rows, strict=True)]


def check_prompt(tokens: Sequence[int], limits: Limits, which: str) -> None:
    """Refuse a prompt that the model can't take.

    Raises:
        PromptError: See `read_prompts`.
    """
    if not tokens:
        raise PromptError(f"{which} is empty")
    if len(tokens) >= limits.context_length:
        raise PromptError(
            f"{which} has {len(tokens)} tokens, and the context of {limits.context_length} has to hold one "
            "more: shorten it"
        )
    for position, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limits.vocabulary_size:
            raise PromptError(
                f"{which} has the id {token!r} at position {position}; the vocabulary has ids from 0 to "
                f"{limits.vocabulary_size - 1}"
            )


def check_stops(sampling: Sampling, limits: Limits) -> None:
    """Refuse ids that are to stop a sample and that it can't have.

    Raises:
        SamplingError: The vocabulary lacks one.
    """
    for token in sampling.stop_token_ids:
        if token >= limits.vocabulary_size:
            raise SamplingError(
                f"stop_token_ids has the id {token}; the vocabulary has ids from 0 to "
                f"{limits.vocabulary_size - 1}"
            )


def _rows_of(column: Any, lengths: Any) -> list[list[int]]:
    if isinstance(column, torch.Tensor) and (column.ndim != 2 or column.is_floating_point()):
        shape = f"{column.dtype} of shape {list(column.shape)}"
        raise PromptError(f"prompt_ids must be integers of shape [rows, length], not {shape}")
    if isinstance(column, RaggedTensor) and column.values.is_floating_point():
        raise PromptError(f"prompt_ids must be integers, not {column.dtype}")
    try:
        rows = [list(row.tolist() if hasattr(row, "tolist") else row) for row in column]
    except TypeError:
        raise PromptError(f"prompt_ids must have a row of ids for each prompt, not {column!r}") from None
    if lengths is None:
        return rows
    counts, widths = _whole_numbers("prompt_lengths", lengths), [len(row) for row in rows]
    if len(counts) != len(rows) or not all(map(operator.le, counts, widths)) or min(counts, default=0) < 0:
        raise PromptError(f"prompt_lengths {counts} do not fit prompt_ids of {widths} each")
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _whole_numbers(name: str, column: Iterable[Any]) -> list[int]:
    try:
        return [operator.index(value) for value in column]
    except TypeError:
        raise PromptError(f"{name} must be whole numbers, not {column!r}") from None
