"""Two kinds of workers, each written for another release of `demo_tokens`; the driver has none of it."""

import demo_tokens


class Trainer:
    """Written for release 1."""

    def encode(self, text: str) -> tuple[str, list[int]]:
        """The release, and the text's tokens."""
        return demo_tokens.VERSION, demo_tokens.encode(text)


class Engine:
    """Written for release 2, whose function wants another argument."""

    def encode(self, text: str) -> tuple[str, list[int]]:
        """The release, and the text's tokens."""
        return demo_tokens.VERSION, demo_tokens.encode(text, start=-1)
