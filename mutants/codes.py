"""Functions, as code and as they live: which of them a mutation changes, and what they remember."""

import functools
import gc
import inspect
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

CACHED = type(functools.cache(len))
Key = tuple[str, str, int]


def key_of(code: CodeType) -> Key:
    """By which a function is known."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def functions(code: CodeType) -> Iterator[tuple[Key, CodeType]]:
    """All codes below a code, nested ones too."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield key_of(each), each
            yield from functions(each)


def at_import(code: CodeType) -> tuple[Any, ...]:
    """What a module or a class does while it is imported: all but the bodies of functions."""
    below = (
        (each.co_name if each.co_flags & inspect.CO_OPTIMIZED else at_import(each))
        if isinstance(each, CodeType)
        else repr(each)
        for each in code.co_consts
    )
    return (code.co_code, code.co_names, *below)


def changed_functions(before: CodeType, after: CodeType) -> dict[Key, CodeType]:
    """The functions that a mutation changes; none if it changes more, or what can't be told apart."""
    old, new = list(functions(before)), list(functions(after))
    keys = [key for key, _ in old]
    if at_import(before) != at_import(after) or keys != [key for key, _ in new]:
        return {}
    changed = [
        (key, code)
        for (key, code), (_, was) in zip(new, old, strict=True)
        if code != was and code.co_flags & inspect.CO_OPTIMIZED  # the bodies of classes have run
    ]
    # What is made within a function, as an expression in parentheses is, changes with that function.
    clear = {key: code for key, code in changed if keys.count(key) == 1}
    return clear if all(key in clear or "<locals>" in key[1] for key, _ in changed) else {}


def functions_of(files: Collection[str]) -> Iterator[FunctionType]:
    """All functions that live and come from some files."""
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename in files:
            yield each


def caches_of(files: Collection[str]) -> Iterator[Any]:
    """All functions that live, come from some files, and remember what they gave."""
    for each in gc.get_objects():
        wrapped = each.__wrapped__ if type(each) is CACHED else None
        if isinstance(wrapped, FunctionType) and wrapped.__code__.co_filename in files:
            yield each
