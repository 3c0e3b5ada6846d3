"""One choice of an answer, as its tokens come. Pure, but for what decodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from generation.openai.asking import Ask
from generation.openai.text import TextStream
from generation.samples import Added

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Part:
    """What tokens add to a choice.

    Attributes:
        index: Number of the choice.
        prompt: Ids of its prompt's tokens, in its first part alone.
        text: The text that is certain with them.
        at: At which character of the choice's text its tokens begin.
        tokens: Ids.
        texts: The text of each, see `TextStream`.
        logprobs: One for each.
        versions: Pairs of a version of the weights and how many of the tokens, in order, it chose.
        finish_reason: Why the choice ends with them; None while it goes on.
    """

    index: int
    prompt: Sequence[int]
    text: str
    at: int = 0
    tokens: Sequence[int] = ()
    texts: Sequence[str] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[tuple[int, int]] = ()
    finish_reason: str | None = None


class Choice:
    """A sample on its way to a client.

    Args:
        index: Its number in the answer.
        prompt: Ids of its prompt's tokens.
        decode: Text of tokens.
        stops: Strings that end it.

    Attributes:
        is_done: Whether it has ended, for its client: nothing more is told of it.
        count: How many tokens it has.
    """

    def __init__(self, index: int, prompt: Sequence[int], decode: Decode, stops: Sequence[str]) -> None:
        self._index, self._prompt = index, tuple(prompt)
        self.is_done, self.count = False, 0
        self._text, self._at = TextStream(decode, prompt, stops), 0

    def add(self, added: Added) -> Part:
        """Take tokens; where they make a string that ends the choice, it is done."""
        text = self._text.add(added.tokens)
        self.count += len(added.tokens)
        self.is_done = self._text.is_stopped
        versions = [(added.version, len(added.tokens))]
        reason = "stop" if self.is_done else None
        texts = self._text.texts[-len(added.tokens) :]
        return self._part(text, added.tokens, texts, added.logprobs, versions, reason)

    def end(self, reason: str) -> Part:
        """Tell what is left, and why it ends."""
        self.is_done, text = True, self._text.end()
        return self._part(text, (), (), (), (), "stop" if self._text.is_stopped else reason)

    def _part(self, text: str, tokens: Sequence[int], texts: Sequence[str], *more: Any) -> Part:
        at, self._at = self._at, self._at + sum(map(len, texts))
        prompt, self._prompt = self._prompt, ()
        return Part(self._index, prompt, text, at, tokens, texts, *more)


def joined(parts: Sequence[Part]) -> Part:
    """Consecutive parts of a choice as one."""
    first, last = parts[0], parts[-1]
    versions: list[tuple[int, int]] = []
    for version, count in (run for part in parts for run in part.versions):
        if versions and versions[-1][0] == version:
            versions[-1] = version, versions[-1][1] + count
        else:
            versions.append((version, count))
    return Part(
        first.index,
        first.prompt,
        "".join(part.text for part in parts),
        first.at,
        [token for part in parts for token in part.tokens],
        [text for part in parts for text in part.texts],
        [logprob for part in parts for logprob in part.logprobs],
        versions,
        last.finish_reason,
    )


def is_told(part: Part, ask: Ask) -> bool:
    """Whether a stream says it now, and not with the next one: it has more than what chose its tokens."""
    has_tokens = bool(part.tokens) and (ask.wants_ids or ask.wants_logprobs)
    return bool(part.text or part.finish_reason or has_tokens)
