"""`RTensor`: a tensor that is somewhere else, and can be sliced, joined and reordered as it is."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import parse_torch_dtype
from raycrew.tensor_transport._rows import (
    RowIndex,
    Rows,
    RowView,
    TensorShardInfo,
    Window,
    check_permutation,
    dtype_name,
    inverse_permutation,
    join_rows,
    normalize_rows,
    run_bounds,
)
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import HandleReader


class RTensor:
    """A handle on rows of one or several shards, with the shape and dtype of the tensor they make.

    Slicing, selecting, reordering, repeating, splitting and joining make new handles and touch no data. Rows
    lie along the first dimension, columns along the second.

    Args:
        shard: The shard whose rows this handle names, all of them in order; or several, one after another.
        data: A meta tensor of the same shape and dtype, for those who have one already; only checked.

    Raises:
        ValueError: The shards differ in dtype or row shape, or `data` from them.

    Examples:
        >>> registry = ShardRegistry(InlineBackend())
        >>> handle = remotize(torch.arange(8).view(4, 2), registry)
        >>> part = handle[2:]  # no tensor is touched
        >>> part.shape, part.localize().tolist()
        (torch.Size([2, 2]), [[4, 5], [6, 7]])
    """

    __slots__ = ("_reader", "_shards", "_view", "_window")

    def __init__(
        self, shard: TensorShardInfo | Sequence[TensorShardInfo], data: torch.Tensor | None = None
    ) -> None:
        shards = (shard,) if isinstance(shard, TensorShardInfo) else tuple(shard)
        self._fill(shards, RowView.of([s.rows for s in shards]), Window.of(shards))
        if data is not None and (tuple(data.shape) != self.shape or data.dtype != self.dtype):
            raise ValueError(
                f"data is {dtype_name(data.dtype)}{list(data.shape)}, "
                f"the shards make {dtype_name(self.dtype)}{list(self.shape)}"
            )

    def _fill(
        self,
        shards: tuple[TensorShardInfo, ...],
        view: RowView,
        window: Window,
        reader: HandleReader | None = None,
    ) -> None:
        self._shards, self._view, self._window, self._reader = shards, view, window, reader

    def _with(self, view: RowView, window: Window | None = None) -> Self:
        """The same tensor with other rows or columns; shards without a row are dropped."""
        twin = object.__new__(type(self))
        needed, used = view.used() if len(view) else ([0], view)
        twin._fill(tuple(self._shards[i] for i in needed), used, window or self._window, self._reader)
        return twin

    @property
    def registry(self) -> HandleReader | None:
        """What `localize` reads with; None where a handle came without."""
        return self._reader

    def with_registry(self, registry: HandleReader | None) -> Self:
        """The same handle, read through a registry: one that came with another, or without."""
        twin = object.__new__(type(self))
        twin._fill(self._shards, self._view, self._window, registry)
        return twin

    def localize(
        self, *, pad: bool = False, timeout_s: float | None = 600.0, borrow: bool = False
    ) -> torch.Tensor:
        """The tensor that this handle names, read through the registry that it came with.

        That is the registry that put it; in another process one with backends of the same classes, if these
        need to know nothing (`InlineBackend`, `RayRefBackend`, `NodeMemoryBackend`): a handle takes along no
        addresses, actors or tokens.

        Args:
            pad: Restore padding that was trimmed when the tensor was stored.
            timeout_s: Deadline of the requests.
            borrow: In place where the backend can, for reading only; see `ShardRegistry.fetch`.

        Raises:
            TransportError: It came without a registry (see `with_registry`), or its shards can't be read.
        """
        if self._reader is None:
            raise without_registry(self)
        wanted = self.padded() if pad else self
        return self._reader.fetch([wanted], timeout_s=timeout_s, borrow=borrow)[0]

    @property
    def shards(self) -> tuple[TensorShardInfo, ...]:
        """The shards that hold the rows."""
        return self._shards

    @property
    def shard(self) -> TensorShardInfo:
        """The one shard that holds the rows.

        Raises:
            ValueError: There are several.
        """
        if len(self._shards) != 1:
            raise ValueError(f"this handle has {len(self._shards)} shards; see .shards")
        return self._shards[0]

    @property
    def view(self) -> RowView:
        """Which rows of which shard, in order."""
        return self._view

    @property
    def columns_range(self) -> tuple[int, int]:
        """First and one past the last column, in the numbering of the stored tensor."""
        return self._window.start, self._window.end

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that `localize` gives."""
        stored = self._shards[0].shape
        if not stored:
            return torch.Size(())
        if len(stored) == 1:
            return torch.Size((len(self._view),))
        return torch.Size((len(self._view), self._window.shown, *stored[2:]))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor that `localize` gives."""
        return parse_torch_dtype(self._shards[0].dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._shards[0].shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that `localize` gives."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def data(self) -> torch.Tensor:
        """A meta tensor: shape and dtype, no data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def is_whole(self) -> bool:
        """Whether this is one whole shard, as stored."""
        only, runs = self._shards[0], self._view.runs
        return (
            len(self._shards) == 1
            and len(self._view) == only.rows
            and (not only.rows or (len(runs) == 1 and runs[0, 1] == 0))
            and self.columns_range == only.columns
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a handle on a tensor without dimensions has no length")
        return len(self._view)

    def __eq__(self, other: object) -> bool:
        """Whether both name the same rows and columns of the same shards; nothing is read."""
        if not isinstance(other, RTensor):
            return NotImplemented
        return self is other or (
            (self.shape, self.dtype, self._window) == (other.shape, other.dtype, other._window)
            and self._named_runs() == other._named_runs()
        )

    def __hash__(self) -> int:
        return hash((self.shape, self._window, len(self._view)))

    def _named_runs(self) -> list[tuple[str, int, int]]:
        runs = self._view.merged().runs.tolist()
        return [(self._shards[shard].shard_id, row, length) for shard, row, length in runs]

    def __repr__(self) -> str:
        schemes = ", ".join(sorted({shard.scheme for shard in self._shards}))
        return f"RTensor({dtype_name(self.dtype)}{list(self.shape)}, {len(self._shards)} shards: {schemes})"

    def __reduce__(self) -> tuple[Any, ...]:
        reader = self._reader and self._reader.for_others()
        if reader is None or self not in reader:
            return _rebuild, (self._shards, self._view, self._window)
        return _rebuild, (self._shards, self._view, self._window, reader)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a handle is never changed, and a copy of it would be one on the same bytes."""
        return self

    def __getitem__(self, index: Any) -> Self:
        """Rows by slice, list, tensor or mask; columns by a second slice: `h[rows]`, `h[rows, a:b]`."""
        if not isinstance(index, tuple):
            return self.select(index)
        if len(index) != 2 or not isinstance(index[1], slice) or index[1].step not in (None, 1):
            raise TypeError(f"a handle takes [rows] or [rows, a:b], got [{', '.join(map(repr, index))}]")
        rows, columns = index
        start, stop, _ = columns.indices(self._window.shown if self.ndim > 1 else 0)
        return self.columns(start, max(start, stop)).select(rows)

    def slice(self, start: int, end: int) -> Self:
        """The rows from `start` up to `end`.

        Raises:
            IndexError: They are not all there.
        """
        if not 0 <= start <= end <= len(self):
            raise IndexError(f"rows {start}..{end} are not within the {len(self)} rows of the handle")
        return self._with(self._view.take(slice(start, end)))

    def select(self, rows: RowIndex) -> Self:
        """The rows that an index names, in its order.

        Raises:
            IndexError: A row does not exist.
            TypeError: It is no row index.
        """
        return self.take_rows(normalize_rows(rows, len(self)))

    def take_rows(self, rows: Rows) -> Self:
        """The rows of a normalised index."""
        return self._with(self._view.take(rows))

    def take_ranges(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Self:
        """The rows from each of `starts`, as many as `lengths` says, one run after another."""
        return self._with(self._view.take_ranges(starts, lengths))

    def apply_order(self, order: RowIndex) -> Self:
        """All rows in another order: row `order[i]` comes as the i-th. `undo_order` undoes it.

        Raises:
            ValueError: `order` is not a permutation.
        """
        return self.take_rows(check_permutation(order, len(self)))

    def undo_order(self, order: RowIndex) -> Self:
        """The rows as they were before `apply_order(order)`: the i-th row goes to position `order[i]`.

        Raises:
            ValueError: `order` is not a permutation.
        """
        return self.take_rows(inverse_permutation(check_permutation(order, len(self))))

    def reorder(self, order: RowIndex) -> Self:
        """As `apply_order`, where `BatchedDataDict.reorder_data` undoes one."""
        return self.apply_order(order)

    def repeat(self, times: int) -> Self:
        """Each row `times` times in a row."""
        if times < 1:
            raise ValueError(f"rows are repeated at least once, got times={times}")
        return self._with(self._view.repeat(times))

    def split(self, parts: int | Sequence[int]) -> list[Self]:
        """Runs of rows: so many of even size (they differ by at most one), or of the given sizes.

        Raises:
            ValueError: The sizes do not add up to the number of rows.
        """
        return [self.slice(start, stop) for start, stop in run_bounds(len(self), parts)]

    def columns(self, start: int, end: int) -> Self:
        """The columns from `start` up to `end` of every row; the others are no padding that comes back.

        Raises:
            IndexError: They are not all there.
        """
        if self.ndim < 2:
            raise IndexError(f"columns {start}..{end} are not within shape {list(self.shape)}")
        return self._with(self._view, self._window.cut(start, end))

    def truncate_columns(self, length: int) -> Self:
        """At most `length` columns, also once `padded`; the same handle if it has none."""
        return self._with(self._view, self._window.truncated(length)) if self.ndim > 1 else self

    def join_rows(self, others: Sequence["RTensor"]) -> "RTensor":
        """The rows of this handle and of others, one after another."""
        return RTensor.concat([self, *others])

    def padded(self) -> Self:
        """With the padding columns that were trimmed when it was stored, up to where it was truncated."""
        return self if self.ndim < 2 else self._with(self._view, self._window.padded())

    @classmethod
    def concat(cls, handles: Sequence["RTensor"]) -> "RTensor":
        """The rows of several handles, one after another.

        Handles whose padding was trimmed may differ in columns: the result has those of all of them.

        Raises:
            ValueError: There is none, or dtypes or row shapes differ, padding included, or cut columns do.
        """
        if not handles:
            raise ValueError("there is no handle to join")
        parts = [(handle.shards, handle.view, handle._window) for handle in handles]  # noqa: SLF001
        joined = object.__new__(cls)
        joined._fill(*join_rows(parts))
        readers = (handle.registry for handle in handles)
        joined._reader = next((reader for reader in readers if reader is not None and joined in reader), None)
        return joined


def without_registry(handle: RTensor) -> TransportError:
    """The error of a handle that nobody here knows how to read."""
    schemes = ", ".join(sorted({shard.scheme for shard in handle.shards}))
    return TransportError(
        f"the handle {handle!r} came without a registry: call localize(handle, registry), or "
        f"handle.with_registry(registry), with one that has a backend for {schemes}"
    )


def _rebuild(
    shards: tuple[TensorShardInfo, ...],
    view: RowView,
    window: Window,
    reader: HandleReader | None = None,
) -> RTensor:
    handle = object.__new__(RTensor)
    handle._fill(shards, view, window, reader)
    return handle
