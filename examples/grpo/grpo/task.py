"""Sorting digits: prompts such as ``3141=``, the answer ``1134``, and a reward that can be verified."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

CHARACTERS = "0123456789="
"""All that prompts and answers are made of."""


@dataclass(frozen=True, slots=True)
class SortingTask:
    """Sort a fixed number of digits.

    Attributes:
        digits: How many digits a prompt has.
        seed: Decides which prompts are held out and the order in which the others come.
        held_out_share: Part of all prompts that training never sees.
    """

    digits: int = 4
    seed: int = 0
    held_out_share: float = 0.2

    def split(self) -> tuple[list[str], list[str]]:
        """All prompts as (train, held out), shuffled and disjoint."""
        prompts = ["".join(digits) + "=" for digits in product("0123456789", repeat=self.digits)]
        random.Random(self.seed).shuffle(prompts)
        n_held_out = max(1, round(len(prompts) * self.held_out_share))
        return prompts[n_held_out:], prompts[:n_held_out]

    def rounds(self, prompts: list[str], size: int) -> Iterator[list[str]]:
        """Endless rounds of `size` prompts; every prompt comes once before one comes again."""
        rng = random.Random(self.seed + 1)
        queue: list[str] = []
        while True:
            while len(queue) < size:
                queue += rng.sample(prompts, len(prompts))
            yield queue[:size]
            del queue[:size]

    def shuffled_example(self, prompt: str, rng: random.Random) -> str:
        """A completion of the right form: the prompt's own digits in random order."""
        digits = list(prompt.rstrip("="))
        rng.shuffle(digits)
        return "".join(digits)


def verify(prompt: str, completion: str) -> float:
    """Reward of one completion: 1.0 if it is exactly the prompt's digits in ascending order, else 0.0."""
    return float(completion == "".join(sorted(prompt.rstrip("="))))
