"""Everything that decides a run, as frozen values; nothing here is read from the machine."""

from dataclasses import dataclass, field, replace
from typing import Any

from grpo import vocabulary


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Size of the decoder-only transformer.

    Attributes:
        layers: Transformer blocks.
        hidden: Width of the residual stream.
        heads: Attention heads; `hidden` is divisible by it.
        max_positions: Longest sequence, prompt and completion together, in tokens.
    """

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    max_positions: int = 32

    def as_llama(self) -> dict[str, Any]:
        """The configuration that transformers and vLLM know such a model by."""
        return {
            "model_type": "llama",
            "vocab_size": vocabulary.SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "pad_token_id": vocabulary.PAD,
            "bos_token_id": None,
            "eos_token_id": vocabulary.END,
            "dtype": "float32",
        }


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """The supervised phase that teaches the format of an answer, not the answer."""

    steps: int = 250
    batch_size: int = 128
    learning_rate: float = 2e-3


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """The reinforcement-learning phase.

    Attributes:
        steps: Rounds of generate, verify, train and synchronise.
        prompts_per_step: Different prompts in a round.
        samples_per_prompt: Completions of each prompt; their rewards are normalised together.
        learning_rate: Of AdamW, constant.
        minibatches: Optimiser steps that each round's data is split into.
        clip: How far the probability ratio may leave 1 before the gradient stops.
        truncate: Largest weight of a token that an older policy sampled.
        kl_weight: Weight of the divergence from the frozen reference policy.
        evaluate_every: Rounds between two measurements on the held-out prompts.
        held_out_prompts: How many held-out prompts one measurement uses.
    """

    steps: int = 60
    prompts_per_step: int = 16
    samples_per_prompt: int = 16
    learning_rate: float = 3e-4
    minibatches: int = 2
    clip: float = 0.2
    truncate: float = 2.0
    kl_weight: float = 0.001
    evaluate_every: int = 5
    held_out_prompts: int = 256


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One whole run."""

    seed: int = 0
    digits: int = 4
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    synchronise: bool = True

    def quick(self) -> "RunConfig":
        """The same run, cut to a few steps: enough for the reward to begin to rise."""
        grpo = replace(self.grpo, steps=10, held_out_prompts=64)
        return replace(self, warmup=replace(self.warmup, steps=150), grpo=grpo)
