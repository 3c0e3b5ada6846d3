"""The main example's workers with a model that needs nothing but torch."""

import sys

import grpo_tiny_model
import torch
from grpo_tiny_model import build_model, token_logprobs

sys.modules["grpo.model"] = grpo_tiny_model

from grpo.generation import Completion, Generator  # noqa: E402
from grpo.learner import Learner  # noqa: E402, F401 - with that model
from grpo.policy import PolicyWorker  # noqa: E402


class TinyPolicy(PolicyWorker):
    """The example's own, on that model."""


class TinyGenerator(Generator):
    """Samples token by token."""

    def __init__(self, config, directory):
        super().__init__(config, directory)
        self.model = build_model(config.model, config.seed)

    def load_weights(self, weights):
        with torch.no_grad():
            for name, tensor in weights:
                self.model.state_dict()[name].copy_(tensor)

    @torch.no_grad()
    def sample(self, prompts, *, samples, temperature, max_tokens, seed):
        torch.manual_seed(seed)
        tokens = torch.tensor(prompts).repeat_interleave(samples, 0)
        start = tokens.shape[1]
        for _ in range(max_tokens):
            logprobs = self.model(tokens).logits[:, -1].log_softmax(-1)
            chosen = logprobs.exp().multinomial(1) if temperature else logprobs.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
        logprobs = token_logprobs(self.model, tokens)[:, start - 1 :]
        rows = [cut(*row) for row in zip(tokens[:, start:].tolist(), logprobs.tolist(), strict=True)]
        return [rows[first : first + samples] for first in range(0, len(rows), samples)]


def cut(tokens, logprobs):
    """Up to the first end token."""
    length = tokens.index(1) + 1 if 1 in tokens else len(tokens)
    return Completion(tokens[:length], logprobs[:length])
