"""What was sampled, token by token, and the batch that it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from raycrew.tensor_transport import BatchedDataDict, RaggedTensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a prompt.

    Attributes:
        prompt_index: Number of its prompt.
        sample_index: Which of the prompt's samples it is.
        tokens: Its ids, with the one that ended it.
        logprobs: Log-probability of each under the model that chose it, at temperature 1.
        versions: Version of the weights that chose each.
        finish_reason: "stop" (an end token), "length" or "abort".
    """

    prompt_index: int
    sample_index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Added:
    """What a step has added to a sample.

    Attributes:
        tokens: Ids.
        logprobs: One for each; see `Sample`.
        version: Version of the weights that chose them.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: int


def pack_samples(samples: Sequence[Sample]) -> BatchedDataDict:
    """A row for each sample, in order.

    Returns:
        `prompt_index`, `sample_index`, `output_lengths`: int64, [rows]. `output_ids`, `weight_versions`
        (int64) and `logprobs` (float32): `RaggedTensor`s, one entry per token. `finish_reason`: a list.
    """
    lengths = [len(sample.tokens) for sample in samples]

    def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> RaggedTensor:
        return RaggedTensor(torch.tensor([value for row in rows for value in row], dtype=dtype), lengths)

    return BatchedDataDict(
        {
            "prompt_index": torch.tensor([sample.prompt_index for sample in samples]),
            "sample_index": torch.tensor([sample.sample_index for sample in samples]),
            "output_ids": ragged([sample.tokens for sample in samples], torch.int64),
            "output_lengths": torch.tensor(lengths),
            "logprobs": ragged([sample.logprobs for sample in samples], torch.float32),
            "weight_versions": ragged([sample.versions for sample in samples], torch.int64),
            "finish_reason": [sample.finish_reason for sample in samples],
        }
    )
