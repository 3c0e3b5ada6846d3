"""The tokenizer and the model, made on the spot; imported only inside worker environments."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo.config import ModelConfig
from grpo.task import CHARACTERS
from raycrew.worker_groups import current_worker

PAD, END = "<pad>", "<end>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, plus padding and end of answer."""
    vocabulary = {token: index for index, token in enumerate([PAD, END, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def llama_config(config: ModelConfig, vocabulary_size: int) -> LlamaConfig:
    """The transformers configuration of a model of this size."""
    return LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=config.hidden,
        intermediate_size=4 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )


def build_model(config: ModelConfig, seed: int) -> LlamaForCausalLM:
    """A model with random weights; the same weights for the same seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(config, len(CHARACTERS) + 2))


def token_logprobs(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
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
