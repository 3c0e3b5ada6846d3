"""A language model that needs nothing but torch, in place of the main example's `grpo.model`."""

from types import SimpleNamespace

import torch

from grpo import vocabulary


class Model(torch.nn.Module):
    """A recurrent language model of a few hundred parameters."""

    def __init__(self, hidden):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary.SIZE, hidden)
        self.mix = torch.nn.GRU(hidden, hidden, batch_first=True)
        self.head = torch.nn.Linear(hidden, vocabulary.SIZE)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.head(self.mix(self.embed(input_ids))[0]))


def build_model(config, seed):
    torch.manual_seed(seed)
    return Model(config.hidden)


def local_device():
    return torch.device("cpu")


def token_logprobs(model, tokens):
    logits = model(input_ids=tokens[:, :-1]).logits
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
