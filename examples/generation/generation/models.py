"""Models by folder or configuration; imported only in workers, as it needs transformers."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from generation.options import EngineOptions
from generation.prompts import Limits


def read_config(options: EngineOptions) -> Any:
    """The model's configuration.

    Raises:
        ValueError: The context is to be longer than the model can.
    """
    given = options.model
    config = (
        AutoConfig.for_model(**given) if isinstance(given, Mapping) else AutoConfig.from_pretrained(given)
    )
    config.dtype = options.dtype
    most = config.max_position_embeddings
    if options.context_length is not None and options.context_length > most:
        raise ValueError(f"a context of {options.context_length} is longer than the model's {most} positions")
    return config


def limits_of(options: EngineOptions, config: Any) -> Limits:
    """What the model can take."""
    return Limits(config.vocab_size, options.context_length or config.max_position_embeddings)


def end_tokens(options: EngineOptions, config: Any) -> tuple[int, ...]:
    """Ids that end a sample: the model's own, and those that its folder names for generation."""
    found = [config.eos_token_id]
    if not isinstance(options.model, Mapping):
        with suppress(OSError):  # it says nothing
            found.append(GenerationConfig.from_pretrained(options.model).eos_token_id)
    ids = chain.from_iterable([one] if isinstance(one, int) else one or () for one in found)
    return tuple(dict.fromkeys(ids))


def expected_weights(config: Any) -> dict[str, torch.Tensor] | None:
    """Names, shapes and dtypes of the weights, as meta tensors; None where some are tied."""
    if config.tie_word_embeddings:
        return None
    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config, dtype=config.dtype).state_dict())


def build_model(options: EngineOptions, config: Any) -> Any:
    """The model: from its folder, or with random weights that are the same for the same seed."""
    if not isinstance(options.model, Mapping):
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=config.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype)
