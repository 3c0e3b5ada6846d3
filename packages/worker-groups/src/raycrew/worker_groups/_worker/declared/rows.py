"""Values that have rows: how many, some of them, and several values made one.

Those are batches (`RowBatch`), arrays and tensors, lists, and tuples and dicts of these, place by place.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

from raycrew.worker_groups.protocols import RowBatch, Shardable

_MEMBERS = ("pad_to_divisor", "slice", "concat", "size")
_BUILT_IN = frozenset({list, tuple, dict})
_INTEGERS = {"int", "uint"}
_LETTERS = re.compile("[A-Za-z]+")


def is_batch(value: Any) -> TypeGuard[RowBatch]:
    """Whether a value is a `RowBatch`, as `isinstance` would say, which takes a hundred times as long."""
    return type(value) not in _BUILT_IN and all(hasattr(value, name) for name in _MEMBERS)


def is_array(value: Any) -> bool:
    """Whether a value is an array, a tensor or a handle of one, with at least one dimension."""
    return hasattr(value, "dtype") and len(getattr(value, "shape", ())) > 0


def is_shardable(value: Any) -> TypeGuard[Shardable]:
    """Whether a value is `Shardable`, by its class: that of a handle has a `shard` that is no method."""
    return all(callable(getattr(type(value), name, None)) for name in ("shard", "concat"))


def count_rows(value: Any, where: str) -> int:
    """The number of rows of a value.

    Args:
        value: The value.
        where: What it is, for errors.

    Raises:
        TypeError: It has none.
        ValueError: Its places have different numbers of rows.
    """
    if is_batch(value):
        return int(value.size)
    if _is_structure(value):
        counts = {f"{where}[{key!r}]": count_rows(part, f"{where}[{key!r}]") for key, part in _places(value)}
        if len(set(counts.values())) == 1:
            return next(iter(counts.values()))
        raise ValueError(f"different numbers of rows: {counts}" if counts else f"{where} has no places")
    if type(value) is list or is_array(value):
        return len(value)
    raise TypeError(
        f"{where} has no rows that can be split or joined: it is {_described(value)}, not a batch, an array, "
        "a tensor, a list, or a tuple or dict of these"
    )


def cut_rows(value: Any, start: int, end: int) -> Any:
    """Some rows of a value, as views where it can give them."""
    if is_batch(value):
        return value.slice(start, end)
    if _is_structure(value):
        return _rebuilt(value, [cut_rows(part, start, end) for _, part in _places(value)])
    return value[start:end]


def own_rows(value: Any) -> Any:
    """A value whose tensors don't take along, when pickled, the rest of what they are views of."""
    if is_batch(value):
        return value
    if _is_structure(value):
        return _rebuilt(value, [own_rows(part) for _, part in _places(value)])
    if not hasattr(value, "untyped_storage") or value.is_sparse:
        return value
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def pad_rows(value: Any, multiple: int) -> Any:
    """A value whose number of rows is a multiple: the first ones are added again, as often as it takes."""
    if is_batch(value):
        return value.pad_to_divisor(multiple)[0]
    if _is_structure(value):
        return _rebuilt(value, [pad_rows(part, multiple) for _, part in _places(value)])
    rows = len(value)
    times, rest = divmod(rows + -rows % multiple, rows)
    return join_rows([*[value] * times, *([value[:rest]] if rest else [])])


def join_rows(parts: Sequence[Any], where: str = "they") -> Any:
    """Values made one, row after row.

    Raises:
        TypeError: They have no rows, or are of different kinds.
    """
    return placewise(parts, _concatenated, where)


def placewise(parts: Sequence[Any], join: Callable[[Sequence[Any], str], Any], where: str) -> Any:
    """Values made one by a function that is given those of each place, and where that is.

    Raises:
        TypeError: They have different places.
    """
    first = parts[0]
    if all(part is None for part in parts):
        return None
    if is_batch(first) or not _is_structure(first):
        return join(parts, where)
    keys = [key for key, _ in _places(first)]
    for part in parts:
        if type(part) is not type(first) or {key for key, _ in _places(part)} != set(keys):
            raise TypeError(f"{where} have different places: {_described(first)} and {_described(part)}")
    at = partial(placewise, join=join)
    return _rebuilt(first, [at([p[key] for p in parts], where=f"{where}[{key!r}]") for key in keys])


def _concatenated(parts: Sequence[Any], where: str) -> Any:
    counts = [count_rows(part, where) for part in parts]
    first = next((part for part, rows in zip(parts, counts, strict=True) if rows), parts[0])
    kind, elements = _kind(first), _elements(first)
    for part in parts:
        if _kind(part) is not kind:
            raise TypeError(f"{where} are of different kinds: {_described(first)} and {_described(part)}")
    # What has no rows, such as `np.array([])`, says nothing of the elements, and must change no others.
    kept = [part for part, rows in zip(parts, counts, strict=True) if rows or _elements(part) == elements]
    if kind is RowBatch:
        return type(first).concat(kept)
    if type(first) is list:
        return [row for part in kept for row in part]
    return _concatenated_arrays(kept, first, where)


def _concatenated_arrays(parts: Sequence[Any], first: Any, where: str) -> Any:
    """Arrays made one, unless elements of some would be made others, and lose digits or their type.

    Integers with and without a sign are joined where their library has integers that hold both.
    """
    others = [part for part in parts if _elements(part) != _elements(first)]
    if not others:
        return _concat_of(first)(list(parts))
    if {_elements(part) for part in parts} == _INTEGERS:
        joined = _concat_of(first)(list(parts))
        if _elements(joined) in _INTEGERS:
            return joined
    raise TypeError(f"{where} are of different element types: {first.dtype} and {others[0].dtype}")


def _kind(value: Any) -> Any:
    return RowBatch if is_batch(value) else type(value)


def _elements(value: Any) -> str:
    """What the elements of an array are, whatever their size and byte order; empty if it is no array."""
    kind = getattr(value, "dtype", "")
    found = _LETTERS.search(str(getattr(kind, "name", kind)).rpartition(".")[2])
    return found[0].replace("bfloat", "float") if found else ""


def _concat_of(array: Any) -> Callable[[list[Any]], Any]:
    """What joins arrays of this kind: of their own library, which is there as they are."""
    own = getattr(type(array), "concat", None)  # handles of arrays
    if own is not None:
        return own  # type: ignore[no-any-return]
    if hasattr(array, "mask") and hasattr(array, "filled"):  # numpy's own concat drops the mask
        return sys.modules["numpy"].ma.concatenate  # type: ignore[no-any-return]
    library = sys.modules[type(array).__module__.partition(".")[0]]
    if hasattr(array, "__array_namespace__"):
        library = array.__array_namespace__()
    join = getattr(library, "concat", None) or getattr(library, "concatenate", None)
    if join is None:
        raise TypeError(f"{library.__name__} has no concat() for its {type(array).__name__}")
    return join  # type: ignore[no-any-return]


def _is_structure(value: Any) -> bool:
    return isinstance(value, tuple) or type(value) is dict


def _places(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if type(value) is tuple or hasattr(value, "_fields") or _is_struct(value):
        return list(enumerate(value))
    raise TypeError(f"{type(value).__qualname__} is a kind of tuple that can't be made of other values")


def _rebuilt(like: Any, parts: Sequence[Any]) -> Any:
    if isinstance(like, Mapping):
        return dict(zip(like, parts, strict=True))
    if hasattr(like, "_fields"):
        return type(like)(*parts)
    return type(like)(parts) if _is_struct(like) else tuple(parts)


def _is_struct(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is of a class that names its places as C code does: `torch.return_types` are."""
    named = getattr(value, "n_sequence_fields", None)
    return named is not None and named == getattr(value, "n_fields", None)


def _described(value: Any) -> str:
    name = type(value).__name__
    if type(value) is dict:
        return f"{name} of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, tuple):
        return f"{name} of {len(value)}"
    return f"{name} without dimensions" if getattr(value, "shape", None) == () else name
