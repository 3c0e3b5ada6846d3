"""How tokens are chosen: checked where it is written down, before anything is sent."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from generation.errors import SamplingError

HOTTEST = 2.0  # vLLM takes no more


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of each prompt's samples are chosen.

    Attributes:
        n: Samples of each prompt.
        temperature: Divides the logits; 0 takes the likeliest token each time. 2 at most.
        top_p: Smallest probability mass that is chosen from, above 0 and at most 1.
        top_k: How many of the likeliest tokens are chosen from; 0 for all.
        max_tokens: Most tokens of a sample; it has no more than fit the model's context beside the prompt.
        stop_token_ids: A sample ends after any of these, beside the model's own end tokens.
        ignore_eos: Whether the model's own end tokens don't end a sample.
        seed: The same prompts at the same numbers then get the same samples, whichever generator makes
            them; None for others each time.

    Raises:
        SamplingError: A value is out of its range.

    Examples:
        >>> Sampling(n=4, temperature=0.7).max_tokens
        16
        >>> Sampling.of({"temprature": 0.7})
        Traceback (most recent call last):
            ...
        generation.errors.SamplingError: there is no sampling option 'temprature'; do you mean 'temperature'?
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, least in (("n", 1), ("max_tokens", 1), ("top_k", 0)):
            _check_whole(name, getattr(self, name), least)
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids", token, 0)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= HOTTEST:
            raise SamplingError(
                f"temperature must be a number from 0 to {HOTTEST:g}, not {self.temperature!r}"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")

    @classmethod
    def of(cls, options: "Sampling | Mapping[str, Any] | None") -> "Sampling":
        """Options by name; those that are not given have their defaults.

        Raises:
            SamplingError: There is no such option, or a value is out of its range.
        """
        if isinstance(options, Sampling):
            return options
        names = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in names:
                raise SamplingError(f"there is no sampling option {name!r}; {_hint(str(name), names)}")
        return cls(**(options or {}))


def _hint(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"do you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # no NaN


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SamplingError(f"{name} must be a whole number of at least {least}, not {value!r}")
