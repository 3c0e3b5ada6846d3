"""Answers in OpenAI's form, whole and in pieces. Pure."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from generation.openai.asking import Ask
from generation.openai.choices import Part

OBJECTS = {"completions": "text_completion", "chat/completions": "chat.completion"}
PREFIXES = {"completions": "cmpl", "chat/completions": "chatcmpl"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What all pieces of an answer have in common.

    Attributes:
        ask: What is answered.
        id: Its name.
        created: When it was asked for, in seconds since 1970.
    """

    ask: Ask
    id: str
    created: int

    @classmethod
    def to(cls, ask: Ask) -> "Answer":
        """An answer that begins now."""
        return cls(ask, f"{PREFIXES[ask.kind]}-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, parts: Sequence[Part], usage: Mapping[str, int]) -> dict[str, Any]:
        """All choices, each of which is one part."""
        choices = [self._choice(part, self._said(part)) for part in parts]
        return {**self._head(OBJECTS[self.ask.kind]), "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """The first piece of a choice of a chat, which says who speaks."""
        choice = self._choice(Part(index, (), ""), {"delta": {"role": "assistant", "content": ""}})
        return self._piece([choice])

    def piece(self, part: Part) -> dict[str, Any]:
        """What tokens add to a choice."""
        said = self._said(part)
        if self.ask.kind == "chat/completions":
            said = {"delta": {"content": part.text} if part.text else {}}
        return self._piece([self._choice(part, said)])

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """The last piece, with counts."""
        return {**self._piece([]), "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.ask.model}

    def _piece(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        kind, usage = OBJECTS[self.ask.kind], {"usage": None} if self.ask.wants_usage else {}
        if self.ask.kind == "chat/completions":
            kind += ".chunk"
        return {**self._head(kind), "choices": choices, **usage}

    def _said(self, part: Part) -> dict[str, Any]:
        if self.ask.kind == "completions":
            return {"text": part.text}
        return {"message": {"role": "assistant", "content": part.text, "refusal": None}}

    def _choice(self, part: Part, said: Mapping[str, Any]) -> dict[str, Any]:
        ids = {"token_ids": list(part.tokens)} if self.ask.wants_ids else {}
        if self.ask.wants_ids and part.prompt:
            ids["prompt_token_ids"] = list(part.prompt)
        return {
            "index": part.index,
            **said,
            "logprobs": self._logprobs(part) if self.ask.wants_logprobs else None,
            "finish_reason": part.finish_reason,
            "weight_versions": [list(run) for run in part.versions],
            **ids,
        }

    def _logprobs(self, part: Part) -> dict[str, Any]:
        texts, logprobs = list(part.texts), list(part.logprobs)
        if self.ask.kind == "completions":
            offsets = list(accumulate(map(len, texts[:-1]), initial=part.at)) if texts else []
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage_of(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> dict[str, int]:
    """Counts of tokens: of each prompt once, and of all choices."""
    asked, made = sum(map(len, prompts)), sum(counts)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
