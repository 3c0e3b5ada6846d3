"""The main example's workers with a model that needs nothing but torch."""

import sys

import grpo_tiny_model
import torch
from grpo_tiny_model import build_model

sys.modules["grpo.model"] = grpo_tiny_model

from generation.choosing import choose  # noqa: E402
from generation.engine import EngineLoad, LoadingEngine, Piece  # noqa: E402
from generation.prompts import Limits  # noqa: E402
from generation.worker import GenerationWorker  # noqa: E402
from grpo.config import ModelConfig  # noqa: E402
from grpo.policy import PolicyWorker  # noqa: E402
from grpo.vocabulary import END  # noqa: E402


class TinyPolicy(PolicyWorker):
    """The example's own, on that model."""


class TinyEngine(LoadingEngine):
    """Samples one token for all that there is, each time from the whole of what came before."""

    def __init__(self, model):
        self.limits = Limits(model["vocab_size"], model["max_position_embeddings"])
        self.model = build_model(ModelConfig(hidden=model["hidden_size"]), 0)
        self.weights = {name: tensor.to("meta") for name, tensor in self.model.state_dict().items()}
        self.rows = {}

    def add(self, request):
        seed = torch.Generator().manual_seed(request.seed)
        self.rows[request.id] = (request, seed, [*request.prompt])

    @torch.no_grad()
    def step(self):
        pieces = [self._next(*row) for row in self.rows.values()]
        self.abort([piece.request_id for piece in pieces if piece.finish_reason])
        return pieces

    def _next(self, request, seed, tokens):
        logits = self.model(torch.tensor([tokens])).logits[0, -1]
        token = choose(logits, request.sampling, seed)
        tokens.append(token)
        is_last = len(tokens) == len(request.prompt) + request.max_tokens
        reason = "stop" if token == END else "length" if is_last else None
        return Piece(request.id, [token], [float(logits.log_softmax(-1)[token])], reason)

    def abort(self, request_ids):
        for request_id in request_ids:
            self.rows.pop(request_id, None)

    def load_weights(self, weights):
        with torch.no_grad():
            for name, tensor in weights:
                self.model.state_dict()[name].copy_(tensor)

    def forget_computed(self):
        """It remembers nothing."""

    reset_prefix_cache = close = forget_computed

    def load(self):
        return EngineLoad(len(self.rows), 0, 0.0)

    def explain(self):
        return "an engine that needs nothing but torch"


class TinyGenerator(GenerationWorker):
    """Samples token by token."""

    def create_engine(self, seed):
        return TinyEngine(self.options.model)
