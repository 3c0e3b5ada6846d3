"""Text as token ids: one for each character, beside padding and the end of an answer."""

from collections.abc import Iterable

from grpo.task import CHARACTERS

PAD, END = 0, 1
_SPECIAL = 2
SIZE = _SPECIAL + len(CHARACTERS)
"""Token ids are below it."""


def encode(text: str) -> list[int]:
    """The ids of a text."""
    return [_SPECIAL + CHARACTERS.index(character) for character in text]


def decode(tokens: Iterable[int]) -> str:
    """The text of ids, without padding and end."""
    return "".join(CHARACTERS[token - _SPECIAL] for token in tokens if token >= _SPECIAL)
