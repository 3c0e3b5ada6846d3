"""A language model that needs nothing but torch, in place of the main example's `grpo.model`."""

from types import SimpleNamespace

import torch

from grpo.task import CHARACTERS


class Tokenizer:
    """One token per character."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, texts):
        return {"input_ids": [[2 + CHARACTERS.index(c) for c in text] for text in texts]}

    def batch_decode(self, rows, *, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(CHARACTERS[token - 2] for token in row if token > 1) for row in rows]


class Model(torch.nn.Module):
    """A recurrent language model of a few hundred parameters."""

    def __init__(self, hidden):
        super().__init__()
        self.embed = torch.nn.Embedding(len(CHARACTERS) + 2, hidden)
        self.mix = torch.nn.GRU(hidden, hidden, batch_first=True)
        self.head = torch.nn.Linear(hidden, len(CHARACTERS) + 2)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.head(self.mix(self.embed(input_ids))[0]))


def build_tokenizer():
    return Tokenizer()


def build_model(config, seed):
    torch.manual_seed(seed)
    return Model(config.hidden)


def local_device():
    return torch.device("cpu")


def token_logprobs(model, tokens):
    logits = model(input_ids=tokens[:, :-1]).logits
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
