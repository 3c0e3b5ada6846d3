"""What a generator is to the loop; the two kinds differ only in how they sample and how they take weights."""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo.config import RunConfig
from grpo.model import build_model, build_tokenizer
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory, WeightReceipt, WeightReceiver
from raycrew.worker_groups import CurrentWorker, current_worker


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer: its tokens with the end token, and the log-probability of each when sampled."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


class Generator(ABC):
    """Samples completions with the latest weights that it was given.

    Args:
        config: The whole run's configuration.
        directory: Where versions of the weights are found.
    """

    def __init__(self, config: RunConfig, directory: WeightDirectory) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.tokenizer = build_tokenizer()
        with torch.device("meta"):
            shapes = build_model(config.model, config.seed).state_dict()
        self.receiver = WeightReceiver(
            self.load_weights,
            expected=shapes,
            directory=directory,
            rollback="shadow",
            name=f"generator {current_worker().rank}",
        )

    def on_generation(self, worker: CurrentWorker) -> None:
        """Catch up with the others after a restart; before their first update there is nothing to catch."""
        if worker.generation > 0:
            self.receiver.pull(missing_ok=True)

    @abstractmethod
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        temperature: float,
        max_tokens: int,
        seed: int,
    ) -> list[list[Completion]]:
        """Some completions of each prompt; temperature 0 takes the likeliest token each time."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by those of the trainer, named as in its state dict."""

    def apply_weights(self, version: int) -> WeightReceipt:
        """Apply a version while it is published: all generators hold it then, or none."""
        return self.receiver.apply(version)

    def pid(self) -> int:
        """This worker's process."""
        return os.getpid()

    def generate(
        self, prompts: Sequence[str], *, samples: int = 1, temperature: float = 1.0, seed: int = 0
    ) -> BatchedDataDict:
        """Complete each prompt several times.

        Returns:
            One row per completion, a prompt's samples side by side: `tokens` (prompt and completion, int64,
            padded on the right), `mask` (1 on the completion's tokens) and `logprobs` (float32, 0 elsewhere),
            all of shape [rows, length]; `prompts` and `completions` as text; `weight_version`.
        """
        encoded = self.tokenizer(list(prompts))["input_ids"]
        room = self.config.digits + 1
        sampled = self.sample(
            encoded,
            samples=samples,
            temperature=temperature,
            max_tokens=room,
            seed=random.Random(f"{seed}/{current_worker().rank}").getrandbits(31),
        )
        rows = [(ids, c) for ids, group in zip(encoded, sampled, strict=True) for c in group]
        texts = self.tokenizer.batch_decode([list(c.tokens) for _, c in rows], skip_special_tokens=True)
        return BatchedDataDict(
            {
                **pack_rows(rows, pad=self.tokenizer.pad_token_id),
                "prompts": [prompt for prompt in prompts for _ in range(samples)],
                "completions": [text.replace(" ", "") for text in texts],
                "weight_version": self.receiver.tag(len(rows)),
            }
        )


def pack_rows(rows: Sequence[tuple[Sequence[int], Completion]], pad: int) -> Mapping[str, torch.Tensor]:
    """Prompt and completion of each row side by side in rectangular tensors, padded on the right."""
    length = max(len(prompt) + len(completion.tokens) for prompt, completion in rows)
    tokens = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length)
    logprobs = torch.zeros(len(rows), length)
    for row, (prompt, completion) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(completion.tokens)
        tokens[row, :end] = torch.tensor([*prompt, *completion.tokens])
        mask[row, start:end] = 1
        logprobs[row, start:end] = torch.tensor(completion.logprobs)
    return {"tokens": tokens, "mask": mask, "logprobs": logprobs}
