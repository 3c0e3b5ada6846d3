"""What a worker does with the weights of an update: into the layers of vLLM, whole or said not to be."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.integrations.vllm._ahead import Plan, Taken, plan_of
from raycrew.tensor_transport.integrations.vllm._layers import loading_plain_layers

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


def begin(model: torch.nn.Module) -> None:
    """Have the layers take weights as a checkpoint has them; what an earlier update left is dropped."""
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.loaded_weights, info.load_numel = [], 0
        method = getattr(module, "quant_method", None)
        if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None  # vLLM packs experts only as it makes one.
    initialize_layerwise_reload(model)


def load(
    model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]], *, is_tied: bool
) -> Plan | None:
    """Load all of a model: each layer fuses and cuts what is its own.

    Args:
        model: vLLM's.
        weights: (name, tensor), as a checkpoint has them.
        is_tied: Whether the output layer has the weights of the embeddings.

    Returns:
        How its layers can be loaded with others ahead of an update; None where they can't.

    Raises:
        WeightUpdateError: Some parameters got nothing, or a part of what they need.
        Exception: What vLLM raises for names that it does not know, and shapes that do not fit.
    """
    taken = Taken(weights)
    with loading_plain_layers(model) as layers:
        names = _with_head(taken) if is_tied and _has_head(model) else iter(taken)
        model.load_weights(names)  # type: ignore[operator]
    if lacking := [name for name, module in model.named_modules() if _lacks(module)]:
        raise WeightUpdateError(
            f"the update brings not all weights of {lacking[:5]} ({len(lacking)} layers of vLLM's model)"
        )
    return plan_of(model, layers, taken)


@contextlib.contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Have torch, and what packs weights, share out this thread's work among so many."""
    before = torch.get_num_threads()
    change = torch._C.set_num_threads  # noqa: SLF001 - vLLM has put a warning in the place of torch's own
    change(threads)
    try:
        yield
    finally:
        change(before)


def is_tied(model_config: Any) -> bool:
    """Whether a model's output layer has the weights of its embeddings."""
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))


def _has_head(model: torch.nn.Module) -> bool:
    """Whether the output layer has a name of its own; else a model computes with its embeddings."""
    return any(f".{name}".endswith(".lm_head") for name, _ in model.named_modules(remove_duplicate=False))


def _with_head(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name what is tied twice: vLLM's output layer may compute with a copy of its own, packed for the CPU."""
    embeddings, has_head = None, False
    for name, tensor in weights:
        embeddings = tensor if name.endswith(_EMBEDDINGS) else embeddings
        has_head = has_head or name == _HEAD
        yield name, tensor
    if embeddings is not None and not has_head:
        yield _HEAD, embeddings


def end(model: torch.nn.Module, model_config: Any) -> None:
    """Have the layers make of the weights what they compute with."""
    finalize_layerwise_reload(model, model_config)


def _lacks(module: torch.nn.Module) -> bool:
    """Whether a layer still waits for weights: those that are loaded whole do not."""
    info = get_layerwise_info(module)
    wanted = sum(_size(parameter) for parameter in module.parameters(recurse=False))
    if not info.can_load() or not wanted:
        return False
    if isinstance(module, VocabParallelEmbedding):  # Rows that no token has are loaded by nobody.
        rows = module.shard_indices
        wanted -= (rows.num_org_vocab_padding + rows.num_added_vocab_padding) * module.embedding_dim
    return bool(info.load_numel < wanted)


def _size(parameter: torch.Tensor) -> int:
    """Elements that a checkpoint has of a parameter."""
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))
