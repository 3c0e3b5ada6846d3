"""Iteration over a batch that can be stopped, saved and taken up again."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar

from raycrew.tensor_transport._rows import Passes, Rows, whole_number

PartT = TypeVar("PartT")


class BatchIterator(Generic[PartT]):
    """Gives the parts of a batch, one or several times over; made by `BatchedDataDict.make_iterator`.

    `state_dict()` is the position after the parts that were given. A new iterator over the same rows, made
    with the same arguments, goes on from there with `load_state_dict`, in the same order. Other rows are told
    by a checksum of each column, taken once: when a position is first asked for or given. It counts all rows
    of columns of up to about 16 MiB and 16 rows of larger ones, also of handles, which are read for that
    through the registry that they came with. Handles without one, or whose shards were released or lost by
    then, and objects that can't be saved, don't count: a loop that releases parts as it goes asks for a first
    position before that, to have them count. Rows that are changed in place later are other rows: positions
    hold for rows as they were.
    """

    def __init__(
        self,
        passes: Passes,
        take: Callable[[Rows], PartT],
        epochs: int | None,
        checksums: Callable[[], Mapping[str, int]],
    ) -> None:
        epochs = None if epochs is None else whole_number(epochs, "epochs")
        if epochs is None and not passes.steps:
            raise ValueError(f"{passes.size} rows have no step of {passes.batch_size}: it would never end")
        self._passes, self._take, self._epochs = passes, take, epochs
        self._epoch = self._step = 0
        self._order = passes.order(0)
        self._checksums = functools.cache(lambda: dict(checksums()))

    @property
    def epoch(self) -> int:
        """The pass that the next part belongs to, from 0 on."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """How many parts one pass has."""
        return self._passes.steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PartT:
        if not self._passes.steps or self._epoch == self._epochs:
            raise StopIteration
        part = self._take(self._passes.rows(self._step, self._order))
        self._step += 1
        if self._step == self._passes.steps:
            self._go_to(self._epoch + 1, 0)
        return part

    def __len__(self) -> int:
        """How many parts are still to come.

        Raises:
            TypeError: There is no end to them.
        """
        if self._epochs is None:
            raise TypeError("an iterator without a number of epochs has no length")
        return (self._epochs - self._epoch) * self._passes.steps - self._step

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on: plain numbers, to be saved as JSON or otherwise.

        Raises:
            TransportError: The batch has handles whose shards are there, and can't be read.
        """
        position = {"epoch": self._epoch, "step": self._step, "columns": dict(self._checksums())}
        return {**vars(self._passes), **position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state_dict` told.

        Raises:
            ValueError: It is one of an iterator over other rows, or with other arguments. Columns that only
                one of the two batches has don't matter.
            TypeError: It is no position at all.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"a position is what state_dict() gave, not a {type(state).__name__}")
        position = {key: value for key, value in state.items() if key != "columns"}
        epoch, step = self._passes.check_state(position, self._epochs)
        self._check_columns(state.get("columns"))
        self._go_to(epoch, step)

    def _check_columns(self, theirs: Any) -> None:
        if not isinstance(theirs, Mapping):
            raise ValueError("a saved position has checksums of columns, and this one has not")
        mine = self._checksums()
        both = mine.keys() & theirs.keys()
        if differ := sorted(key for key in both if mine[key] != theirs[key]):
            raise ValueError(f"the position is one in other rows: columns {', '.join(differ)} differ")
        if mine and theirs and not both:
            raise ValueError("the position is one in other rows: no column of theirs is in this batch")

    def _go_to(self, epoch: int, step: int) -> None:
        self._order = self._passes.order(epoch) if epoch != self._epoch else self._order
        self._epoch, self._step = epoch, step
