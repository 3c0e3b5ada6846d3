"""What becomes of samples on their way when generation pauses."""

from collections.abc import Sequence
from typing import Literal

PauseMode = Literal["finish", "abort", "continue"]
PAUSE_MODES = ("finish", "abort", "continue")


def check_mode(mode: str, modes: Sequence[str]) -> None:
    """Refuse a mode that is not among some.

    Raises:
        ValueError: It is not.
    """
    if mode not in modes:
        raise ValueError(f"there is no mode {mode!r}; there are {', '.join(map(repr, modes))}")
