"""Sizes of memory, as options give them; pure."""

import re
from typing import Any

_UNITS = {
    "": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(["", "K", "M", "G", "T"])},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_bytes(option: str, value: Any) -> int:
    """A size in bytes: of a number of them, or of a text such as "8GB" (10 ** 9) or "8GiB" (2 ** 30).

    Args:
        option: What it is called.
        value: The size.

    Raises:
        TypeError: It is neither a whole number nor a text.
        ValueError: It is no size, or less than a byte.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{option} is a number of bytes, or a text such as '8GB', not {value!r}")
    found = _SIZE.fullmatch(str(value))
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size < 1:
        raise ValueError(
            f"{option} is {value!r}; a size is a number of bytes, or a text such as '8GB' or '8GiB'"
        )
    return size
