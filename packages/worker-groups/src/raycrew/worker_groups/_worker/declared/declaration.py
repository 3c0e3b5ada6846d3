"""What was said on a method, and finding it on a class."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import update_wrapper
from types import FunctionType
from typing import Any, Literal, get_args

from ray import cloudpickle

Kind = Literal["sharded", "replicated", "rank_zero", "per_rank"]
Mode = Literal["concat", "list", "first", "sum", "mean"]

MODES: tuple[str, ...] = get_args(Mode)

_ATTRIBUTE = "_raycrew_declared"
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Function:
    """A function that joins results, on its way to a process that perhaps can't import it."""

    def __init__(self, fn: Callable[[list[Any]], Any] | None, name: str, why_not: str = "") -> None:
        self.fn, self.name, self.why_not = fn, name, why_not

    def __reduce__(self) -> tuple[Any, ...]:
        if self.fn is None:
            return Function, (None, self.name, self.why_not)
        return _arrived, (cloudpickle.dumps(self.fn), self.name)  # type: ignore[no-untyped-call]


def _arrived(pickled: bytes, name: str) -> Function:
    try:
        return Function(cloudpickle.loads(pickled), name)
    except Exception as error:  # noqa: BLE001 - whatever its module does; told when it is needed
        return Function(None, name, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Declaration:
    """How a method is called by `group.call`.

    Attributes:
        kind: The decorator.
        collect: How results become one value.
        axis: Of `sharded`, the axis over which arguments are split.
        split: Names of the parameters that are split; None for the only one there is.
        pad: Of `sharded`, whether rows are filled up to a multiple of the axis's size.
        results_at: Of `sharded`, coordinates on other axes at which results are taken, where not 0.
    """

    kind: Kind
    collect: Mode | Function
    axis: str = ""
    split: tuple[str, ...] | None = None
    pad: bool = False
    results_at: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"@{self.kind}({self.axis!r})" if self.axis else f"@{self.kind}"

    @property
    def promise(self) -> tuple[str, str]:
        """What a caller's types go by."""
        return self.kind, self.collect if isinstance(self.collect, str) else "a function"

    @property
    def splits(self) -> bool:
        """Whether arguments are split."""
        return self.kind in ("sharded", "per_rank")


def declare(method: Any, declaration: Declaration) -> Any:
    """The method, as a function of its own on which it is noted how it is called.

    Raises:
        TypeError: It is no function, is a generator, or is declared already.
    """
    if isinstance(method, staticmethod | classmethod):
        raise TypeError(f"{declaration} goes below @{type(method).__name__}, next to the function")
    if not inspect.isfunction(method):
        raise TypeError(f"{declaration} goes on a method of a worker class, not on {method!r}")
    if (known := declaration_of(method)) is not None:
        raise TypeError(f"{method.__qualname__} is declared twice: {declaration} and {known}")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(_no_generator(method.__qualname__, declaration))
    declared = _copied(method)  # the function itself may be another class's, which says nothing of it
    setattr(declared, _ATTRIBUTE, declaration)
    return declared


def _copied(fn: FunctionType) -> FunctionType:
    made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    update_wrapper(made, fn)
    vars(made).pop("__wrapped__")
    vars(made).update(vars(fn))
    return made


def declaration_of(method: Any) -> Declaration | None:
    """What was said on a function itself."""
    found = getattr(getattr(method, "__func__", method), _ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None


def find_declaration(cls: type, name: str, signature: inspect.Signature) -> Declaration | None:
    """How a class's method is called: as it says itself, else as the method that it overrides says.

    Args:
        cls: The worker class.
        name: Name of the method.
        signature: Its parameters, without `self`.

    Returns:
        The declaration, with the names of the parameters that are split.

    Raises:
        TypeError: The method does not fit what is said of it.
    """
    own = (vars(base).get(name) for base in cls.__mro__)
    declaration = next((found for fn in own if (found := declaration_of(fn)) is not None), None)
    if declaration is None:
        return None
    called = f"{cls.__qualname__}.{name}"
    fn = inspect.unwrap(getattr(cls, name))
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(_no_generator(called, declaration))
    if not declaration.splits:
        return declaration
    return replace(declaration, split=_split_names(called, declaration, signature.parameters))


def _split_names(
    called: str, declaration: Declaration, parameters: Mapping[str, inspect.Parameter]
) -> tuple[str, ...]:
    known = f"its parameters are {', '.join(parameters) or 'none'}"
    if declaration.split is not None:
        if unknown := [name for name in declaration.split if name not in parameters]:
            raise TypeError(f"{called} is {declaration} and has no {', '.join(unknown)} to split; {known}")
        return declaration.split
    if len(parameters) == 1 and next(iter(parameters.values())).kind not in _SEVERAL:
        return tuple(parameters)
    raise TypeError(
        f"{called} is {declaration}: which of its arguments are split, and which go to all as they are? "
        f"Name those that are split, as in split=['batch']; {known}"
    )


def _no_generator(called: str, declaration: Declaration) -> str:
    return (
        f"{called} can't be {declaration}: a generator's items come one by one, and are not joined; "
        "group.stream() and the calls that name ranks or axes take it undeclared"
    )
