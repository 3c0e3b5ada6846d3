"""Choosing the next token from logits."""

import torch

from generation.sampling import Sampling


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token.

    Args:
        logits: float32, [vocabulary].
        sampling: How.
        generator: Where the randomness comes from; on the CPU.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The largest logit is 0, and however small a temperature is, it stays so: no infinity comes up.
    probabilities = ((logits - logits.max()).double() / sampling.temperature).softmax(-1).cpu()
    if sampling.top_k:
        least = probabilities.topk(min(sampling.top_k, len(probabilities))).values[-1]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities / probabilities.sum(), sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _nucleus(probabilities: torch.Tensor, mass: float) -> torch.Tensor:
    """Only the likeliest, up to the one that makes their sum reach `mass`."""
    ordered, places = probabilities.sort(descending=True)
    kept = ordered.where(ordered.cumsum(-1) - ordered < mass, 0.0)
    return torch.zeros_like(probabilities).scatter(0, places, kept)
