"""What a worker raises, on its way to the caller: of the same type there, whatever its constructor wants."""

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import cloudpickle


def as_portable(error: BaseException) -> BaseException:
    """The same error, which pickle brings back from now on.

    Pickle makes an error anew from its `args`, which fails where the constructor wants something else, and
    gives up on one that holds a lock, say. Such a class is then taken apart and put together without its
    constructor; what can't be pickled of it becomes text.
    """
    if not _comes_back(error):
        copyreg.pickle(type(error), _taken_apart)
    return error


@contextmanager
def told_to_the_caller() -> Iterator[None]:
    """Within, errors are raised as portable ones."""
    try:
        yield
    except Exception as error:
        as_portable(error)
        raise


def _comes_back(error: BaseException) -> bool:
    try:
        return _looks(_there_and_back(error)) == _looks(error)
    except Exception:  # noqa: BLE001 - whatever the error's own code raises on its way
        return False


def _there_and_back(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def _looks(error: BaseException) -> tuple[str, str, set[str]]:
    return type(error).__qualname__, repr(error.args), set(vars(error))


def _taken_apart(error: BaseException) -> tuple[Any, ...]:
    state = {name: _or_text(value) for name, value in vars(error).items()}
    return put_together, (type(error), tuple(map(_or_text, error.args)), state)


def put_together(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """An error of a class without a call of its constructor; the other end of `as_portable`."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(cls, *args)
    if isinstance(error, OSError):
        OSError.__init__(error, *args)
    error.args = args
    vars(error).update(state)
    return error


def _or_text(value: Any) -> Any:
    try:
        _there_and_back(value)
    except Exception:  # noqa: BLE001 - whatever its own code raises
        return repr(value)
    return value
