"""How large an argument is, roughly and quickly, and storing what several workers share just once."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import ray

#: From here on one object in the store is cheaper than a copy in each call.
STORE_FROM_BYTES = 100_000

_MAX_PARTS = 1000
_SCALARS = frozenset({int, float, bool, type(None)})


def size_hint(value: Any) -> int:
    """About how many bytes `value` takes on the wire; looks at no more than a thousand parts."""
    total, seen, stack = 0, 0, [value]
    while stack and seen < _MAX_PARTS and total < STORE_FROM_BYTES:
        part = stack.pop()
        seen += 1
        total += _own_size(part)
        stack += _parts(part)
    return total if seen < _MAX_PARTS else max(total, STORE_FROM_BYTES)


def _own_size(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    size = getattr(value, "nbytes", 8)
    return size if isinstance(size, int) else 8


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()] if len(value) < _MAX_PARTS else [None] * _MAX_PARTS
    if isinstance(value, Sequence | Set) and not isinstance(
        value, str | bytes | bytearray | range | memoryview
    ):
        return list(value) if len(value) < _MAX_PARTS else [None] * _MAX_PARTS
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict) and not hasattr(value, "nbytes") and not isinstance(value, type):
        return list(state.values())
    return []


class SharedStore:
    """Puts an object that several calls share into the store once, however often it is asked for.

    Sharing is by identity: the caller keeps its objects alive while it uses this.
    """

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}

    def share(self, value: Any) -> Any:
        """`value` itself if it is small, else its reference."""
        if type(value) in _SCALARS or (type(value) is str and len(value) < STORE_FROM_BYTES):
            return value  # as `size_hint` would say, which takes longer
        key = id(value)
        if key not in self._refs:
            self._refs[key] = ray.put(value) if self._is_worth_it(value) else value
        return self._refs[key]

    def _is_worth_it(self, value: Any) -> bool:
        return not isinstance(value, ray.ObjectRef) and size_hint(value) >= STORE_FROM_BYTES
