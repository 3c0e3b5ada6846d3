"""What of a model is published, and how: which names, under which names, in which dtype."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

Select: TypeAlias = Callable[[str], bool] | Collection[str]
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]
Transform: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor | Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class Selection:
    """Options of a publisher, applied to each tensor in this order.

    Args:
        select: Names to publish (as the model has them), or a predicate; None for all.
        dtype: Cast floating-point tensors to this.
        transform: Called with name and whole tensor; returns what to publish in its place: one tensor, or
            several with their names, as a quantisation with its scales does. None for nothing.
        rename: Name -> name that receivers know; a mapping leaves names that it lacks as they are.

    Raises:
        TypeError: `select` is one text, or can be looked through only once.
    """

    select: Select | None = None
    dtype: torch.dtype | None = None
    transform: Transform | None = None
    rename: Rename | None = None

    def __post_init__(self) -> None:
        names = self.select
        if names is not None and not callable(names) and not _is_collection(names):
            raise TypeError(f"select= is a predicate, or names in a list or set, not {names!r}")

    @property
    def keeps_shapes(self) -> bool:
        """Whether shapes and dtypes of what is published are known before a tensor is at hand."""
        return self.transform is None

    def wants(self, name: str) -> bool:
        """Whether a tensor is published."""
        if self.select is None:
            return True
        return self.select(name) if callable(self.select) else name in self.select

    def name_of(self, name: str) -> str:
        """The name that receivers know.

        Raises:
            TypeError: It is no text, as where `rename` forgets to return one.
        """
        found = name
        if self.rename is not None:
            found = self.rename(name) if callable(self.rename) else self.rename.get(name, name)
        if not isinstance(found, str):
            raise TypeError(f"a tensor's name is a text, got {found!r} for {name!r}")
        return found

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor is published."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def apply(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) to publish in place of a whole tensor."""
        cast = tensor if tensor.dtype == self.dtype_of(tensor.dtype) else tensor.to(self.dtype)
        if self.transform is None:
            yield self.name_of(name), cast
            return
        made = self.transform(name, cast)
        for inner, found in [(name, made)] if isinstance(made, torch.Tensor) else made:
            yield self.name_of(inner), found


def _is_collection(names: object) -> bool:
    """Whether names can be looked for again and again; a text would have each of its parts."""
    return isinstance(names, Collection) and not isinstance(names, str)
