"""The policy's model, made on the spot; who asks what the policy is like need not import transformers."""

from typing import TYPE_CHECKING

import torch

from grpo.config import ModelConfig
from raycrew.worker_groups import current_worker, heavy_imports

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def build_model(config: ModelConfig, seed: int) -> "LlamaForCausalLM":
    """A model with random weights; the same weights for the same seed."""
    with heavy_imports():
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**config.as_llama()))


def token_logprobs(model: "LlamaForCausalLM", tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token given those before it.

    Args:
        model: A causal language model.
        tokens: Token ids, int64, shape [batch, length], padded on the right.

    Returns:
        float32, shape [batch, length - 1]; column i belongs to token i + 1.
    """
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def local_device() -> torch.device:
    """The GPU that this worker was bound to, or the CPU."""
    index = current_worker().local_device_index
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
