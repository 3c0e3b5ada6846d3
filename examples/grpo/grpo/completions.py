"""Prompts as generators take them, and what they sampled as the policy learns from it."""

from collections.abc import Sequence

import torch

from grpo.vocabulary import PAD, decode, encode
from raycrew.tensor_transport import BatchedDataDict, RaggedTensor


def prompts_of(texts: Sequence[str]) -> BatchedDataDict:
    """A generator's batch of these prompts."""
    return BatchedDataDict(
        {"prompt_ids": [encode(text) for text in texts], "prompt_index": torch.arange(len(texts))}
    )


def completions_of(texts: Sequence[str], samples: BatchedDataDict) -> BatchedDataDict:
    """What a policy learns from, made of what generators sampled from prompts, from each as often.

    Args:
        texts: The prompts, in their order.
        samples: What `generate` gave, those of a prompt side by side.

    Returns:
        One row per sample: `tokens` (prompt and completion, int64, padded on the right), `mask` (1 on the
        completion's tokens) and `logprobs` (float32, 0 elsewhere), all of shape [rows, length]; `prompts` and
        `completions` as text; `weight_version` (int64, [rows]), the oldest that chose one of its tokens.
    """
    prompts = [text for text in texts for _ in range(samples.size // len(texts))]
    before, sampled = [encode(prompt) for prompt in prompts], [row.tolist() for row in samples["output_ids"]]
    rows = [ids + more for ids, more in zip(before, sampled, strict=True)]
    starts, ends = (torch.tensor([len(row) for row in part]) for part in (before, rows))
    tokens = RaggedTensor(torch.tensor([token for row in rows for token in row]), ends).to_padded(PAD)
    places = torch.arange(tokens.shape[1])
    is_sampled = (places >= starts[:, None]) & (places < ends[:, None])
    return BatchedDataDict(
        {
            "tokens": tokens,
            "mask": is_sampled.float(),
            "logprobs": torch.zeros(tokens.shape).masked_scatter(is_sampled, samples["logprobs"].values),
            "prompts": prompts,
            "completions": [decode(row) for row in sampled],
            "weight_version": torch.tensor([min(row.tolist()) for row in samples["weight_versions"]]),
        }
    )
