"""Arrays that mean more than their elements say are refused, not stripped of it."""

import numpy as np


def refuse_special_array(value: object, what: str) -> None:
    """Raise for subclasses of numpy's array: a mask, a unit or a shape that always has two dimensions.

    Files mapped into memory are arrays like others.

    Raises:
        TypeError: It is one; `what` says where it was found.
    """
    if not isinstance(value, np.ndarray) or type(value) in (np.ndarray, np.memmap):
        return
    advice = f"pass np.asarray({what.split()[-1]})" if isinstance(value, np.matrix) else "pass a plain array"
    if isinstance(value, np.ma.MaskedArray):
        advice = "its mask would be lost; pass value.filled(...), and the mask apart"
    raise TypeError(f"{what} is a numpy {type(value).__name__}, not a plain array: {advice}")
