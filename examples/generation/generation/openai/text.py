"""Text of tokens as they come, up to a string that ends it."""

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 4
UNFINISHED = "\ufffd"
MOST_HELD = 8  # tokens; a character has four bytes at most, and what never becomes one is told as it is


class TextStream:
    """Makes text of the tokens of one sample, and tells no character that a later token may change.

    Args:
        decode: Text of tokens.
        prompt: Tokens of the prompt: the first of a sample may be decoded otherwise without what was before.
        stops: Strings that end the text; they do not belong to it.

    Attributes:
        is_stopped: Whether one of them was there.
        texts: What each token has made certain: "" of one that has a part of a character, all of it of the
            last one. In a row they are the text, with the string that ended it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._decode, self._stops = decode, stops
        self._tokens = _context(decode, prompt)
        self._from, self._until = 0, len(self._tokens)  # tokens that are decoded again; those that are told
        self._said = 0  # characters of what is decoded after those
        self._count = len(self._tokens)  # of tokens when a character was told
        self._held = ""
        self.is_stopped, self.texts = False, list[str]()

    def add(self, tokens: Sequence[int]) -> str:
        """Take tokens; gives the text that is certain with them."""
        return "".join(map(self._add, tokens))  # one by one: each character is seen when it is whole

    def _add(self, token: int) -> str:
        if self.is_stopped:
            self.texts.append("")
            return ""
        self._tokens.append(token)
        new, said, count = self._new(), self._said, len(self._tokens)
        sure = len(new.rstrip(UNFINISHED))  # then bytes of a character whose others may come
        if sure > said:
            self._said, self._count = sure, count
        is_held_long = count - self._count >= MOST_HELD
        if not new and not said:  # what stands for no text does not tell how the next token is decoded
            if is_held_long:
                del self._tokens[self._until :]
                self._count = self._until
        elif sure == len(new) or is_held_long:
            sure, self._said, self._count = len(new), 0, count
            self._from, self._until = self._until, count
        self.texts.append(new[said:sure])
        return self._before_stop(new[said:sure], is_last=False)

    def end(self) -> str:
        """The text that was not certain, once there are no more tokens."""
        return "" if self.is_stopped else self._before_stop(self._new()[self._said :], is_last=True)

    def _new(self) -> str:
        told = self._decode(self._tokens[self._from : self._until])
        return self._decode(self._tokens[self._from :])[len(told) :]

    def _before_stop(self, new: str, *, is_last: bool) -> str:
        text = self._held + new
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return text[: min(places)]
        kept = 0 if is_last else max((_beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _context(decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt; fewer, where a half of a character would be first."""
    last = list(prompt[-CONTEXT_TOKENS:])
    begun = (last[at:] for at in range(len(last)))
    return next((tokens for tokens in begun if UNFINISHED not in decode(tokens)), last)


def _beginning(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a string."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
