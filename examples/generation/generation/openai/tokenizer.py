"""Text to tokens and back; imported only in workers, as it needs transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer

from generation.errors import RefusedError
from generation.openai.asking import Ask
from generation.openai.errors import wrong


class Tokenizer:
    """The tokenizer of a folder; used by several threads.

    Args:
        folder: Where it is.
        chat_template: How messages become a prompt; None for what it brings.

    Raises:
        RefusedError: There is none.
    """

    def __init__(self, folder: str, chat_template: str | None) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise RefusedError(f"an endpoint needs a tokenizer, and {folder} has none: {error}") from error
        self._template = chat_template or self._tokenizer.chat_template

    def prompts(self, ask: Ask) -> list[list[int]]:
        """Ids of each prompt that is asked about.

        Raises:
            ApiError: There is no template for chats, or it has no place for these messages.
        """
        if ask.messages:
            return [self._encode(self._of_chat(ask.messages), special=False)]
        return [self._encode(one) if isinstance(one, str) else list(one) for one in ask.prompts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without what stands for no text."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _encode(self, text: str, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _of_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self._template is None:
            raise wrong("messages", "this model has no template for chats: use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes
            raise wrong(
                "messages", f"the model's template for chats refuses the messages: {error}"
            ) from error
        return text
