"""The engine of the plain generator: a transformers model stepped by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import DynamicCache

from generation.choosing import choose
from generation.engine import EngineLoad, LoadingEngine, Piece, Request
from generation.errors import GenerationError, RefusedError
from generation.models import build_model, end_tokens, expected_weights, limits_of, read_config
from generation.options import EngineOptions
from raycrew.tensor_transport import digest_weights

MOST_COHORTS = 4


@dataclass(slots=True)
class Row:
    """A request with its tokens so far."""

    request: Request
    tokens: list[int]
    generator: torch.Generator
    stops: frozenset[int]

    @property
    def made(self) -> int:
        """How many tokens were chosen."""
        return len(self.tokens) - len(self.request.prompt)

    def taken(self, token: int, logprob: float) -> Piece:
        """Add a token; tell whether it is the last."""
        self.tokens.append(token)
        full = self.made >= self.request.max_tokens
        reason: Literal["stop", "length"] | None
        reason = "stop" if token in self.stops else "length" if full else None
        return Piece(self.request.id, [token], [logprob], reason)


@dataclass(slots=True)
class Cohort:
    """Rows that are stepped together, padded on the left, with their keys and values."""

    rows: list[Row]
    cache: DynamicCache | None = None
    mask: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def logits(self, model: Any) -> torch.Tensor:
        """Logits of each row's next token, float32, [rows, vocabulary]."""
        if self.cache is None:
            width = max(len(row.tokens) for row in self.rows)
            padded = [[0] * (width - len(row.tokens)) + row.tokens for row in self.rows]
            counts = torch.tensor([len(row.tokens) for row in self.rows])
            self.mask = (torch.arange(width) >= width - counts[:, None]).long().to(model.device)
            self.cache, new = DynamicCache(config=model.config), torch.tensor(padded)
        else:
            new = torch.tensor([row.tokens[-1:] for row in self.rows])
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        output = model(
            input_ids=new.to(model.device),
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def keep(self, kept: Sequence[int]) -> None:
        """Go on with some of the rows."""
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[at] for at in kept]
        if self.cache is not None and kept:
            chosen = torch.tensor(kept, device=self.mask.device)
            self.cache.batch_select_indices(chosen)
            self.mask = self.mask[chosen]


class TransformersEngine(LoadingEngine):
    """Steps a model for cohorts of requests that came at the same time.

    Args:
        options: The engine to be made.
        seed: Of what is sampled without a seed.

    Raises:
        RefusedError: Tensor parallelism, adapters or further options were asked for.
    """

    def __init__(self, options: EngineOptions, seed: int) -> None:
        if options.tensor_parallel > 1 or options.executor not in (None, "uni"):
            raise RefusedError("the transformers engine is one process: no tensor parallelism, no executors")
        if options.sleep_level is not None:
            raise RefusedError("the transformers engine has no sleep levels: sleep_level must be None")
        if options.max_adapters:
            raise RefusedError("the transformers engine has no LoRA adapters: max_adapters must be 0")
        if options.more:
            raise RefusedError(f"the transformers engine has no further options: {', '.join(options.more)}")
        self.options, config = options, read_config(options)
        self.limits, self._ends = limits_of(options, config), end_tokens(options, config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = build_model(options, config).to(device).eval()
        self.weights = expected_weights(config)
        self._loaded = list(self.model.state_dict())
        self._random = torch.Generator().manual_seed(seed)
        self._waiting: list[Row] = []
        self._cohorts: list[Cohort] = []

    def add(self, request: Request) -> None:
        """See `Engine`."""
        generator = self._random if request.seed is None else torch.Generator().manual_seed(request.seed)
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else self._ends)
        self._waiting.append(Row(request, list(request.prompt), generator, stops))

    @torch.no_grad()
    def step(self) -> Sequence[Piece]:
        """One token for each running request."""
        self._admit()
        pieces = [piece for cohort in self._cohorts for piece in self._step(cohort)]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return pieces

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        gone = set(request_ids)
        self._waiting = [row for row in self._waiting if row.request.id not in gone]
        for cohort in self._cohorts:
            cohort.keep([at for at, row in enumerate(cohort.rows) if row.request.id not in gone])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor into the model's own.

        Raises:
            GenerationError: Some got nothing, one has another shape, or names of one tensor have two values.
        """
        self._loaded = []
        own, lacking = self.model.state_dict(), {p.data_ptr() for p in self.model.parameters()}
        taken: dict[int, str] = {}  # of tied tensors, which nobody has compared yet
        with torch.no_grad():
            for name, tensor in weights:
                mine = own[name]
                if tensor.shape != mine.shape:
                    raise GenerationError(
                        f"{name} is {list(tensor.shape)}, and {list(mine.shape)} in the model"
                    )
                before = taken.setdefault(mine.data_ptr(), name)
                if before != name and not torch.equal(mine, tensor.to(mine)):
                    raise GenerationError(f"{name} and {before} are one tensor here, and two in the update")
                mine.copy_(tensor)
                self._loaded.append(name)
                lacking.discard(mine.data_ptr())
        if lacking:
            raise GenerationError(f"the update brings nothing for {len(lacking)} of the model's tensors")

    def digest(self) -> str | None:
        """See `Engine`: of the tensors that the last version named."""
        own = self.model.state_dict()
        return digest_weights((name, own[name].cpu()) for name in self._loaded)

    def forget_computed(self) -> None:
        """See `Engine`."""
        for cohort in self._cohorts:
            cohort.cache = None

    def reset_prefix_cache(self) -> None:
        """Nothing is kept of prompts that have ended."""

    def load(self) -> EngineLoad:
        """See `Engine`; keys and values may be as many as all running requests have at full length."""
        running = sum(len(cohort.rows) for cohort in self._cohorts)
        used = sum(cohort.mask.numel() for cohort in self._cohorts if cohort.cache is not None)
        most = self.options.max_running * self.limits.context_length
        return EngineLoad(running, len(self._waiting), used / most)

    def close(self) -> None:
        """See `Engine`."""
        self._cohorts.clear()
        del self.model

    def explain(self) -> str:
        """See `Engine`."""
        return (
            "a transformers model, stepped in the worker's own process; no tensor parallelism, no adapters, "
            "no prefix cache; to sleep is to give the model up, and to wake to build it anew"
        )

    def _admit(self) -> None:
        room = self.options.max_running - sum(len(cohort.rows) for cohort in self._cohorts)
        new, self._waiting = self._waiting[:room], self._waiting[room:]
        if new:
            self._cohorts.append(Cohort(new))
        if len(self._cohorts) > MOST_COHORTS:  # few large ones are stepped faster than many small ones
            self._cohorts = [Cohort([row for cohort in self._cohorts for row in cohort.rows])]

    def _step(self, cohort: Cohort) -> list[Piece]:
        logits = cohort.logits(self.model)
        logprobs = logits.log_softmax(-1)
        pieces = []
        for at, row in enumerate(cohort.rows):
            token = choose(logits[at], row.request.sampling, row.generator)
            pieces.append(row.taken(token, float(logprobs[at, token])))
        cohort.keep([at for at, piece in enumerate(pieces) if piece.finish_reason is None])
        return pieces
