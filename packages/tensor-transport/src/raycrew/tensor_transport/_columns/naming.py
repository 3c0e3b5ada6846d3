"""Names of columns and of options in errors, and the near miss of one that is unknown."""

import difflib
from collections.abc import Collection, Iterable


def name_columns(keys: Iterable[str]) -> str:
    """Some columns' names, for an error."""
    names = sorted(map(str, keys))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def refuse_unknown(given: Iterable[object], known: Collection[str], what: str) -> None:
    """Refuse names that would be ignored.

    Raises:
        ValueError: One is unknown; the error says which known one is close.
    """
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{what} names {name!r}, but there are only {name_columns(known)}{hint}")


def listed_columns(keys: Iterable[str], known: Collection[str]) -> list[str]:
    """The columns that a caller names, each once.

    Raises:
        KeyError: One is not there; the error says which one is close.
        TypeError: It is one name, not several.
    """
    if isinstance(keys, str):
        raise TypeError(f"columns are named by a list, not by the one string {keys!r}")
    listed = list(dict.fromkeys(keys))
    if unknown := [key for key in listed if key not in known]:
        close = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise KeyError(f"there are no columns {name_columns(unknown)}; there are {name_columns(known)}{hint}")
    return listed
