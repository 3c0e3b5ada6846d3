"""Numbers of rows, parts and passes that callers give: whole ones, as plain integers."""

import numpy as np


def whole_number(value: object, what: str, *, least: int = 0) -> int:
    """A number as a plain integer.

    Raises:
        ValueError: It is no integer (a truth value is none), or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{what} is an integer of at least {least}, not {value!r}")
    return int(value)
