"""Making one value of the results of several ranks, as a method declares it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycrew.worker_groups._worker.declared.declaration import Function, Mode
from raycrew.worker_groups._worker.declared.rows import count_rows, cut_rows, join_rows
from raycrew.worker_groups._worker.declared.totals import add_up, average
from raycrew.worker_groups.errors import ResultJoinError
from raycrew.worker_groups.protocols import ArgumentTransport

_Joining = Callable[[Sequence[Any], str], Any]


@dataclass(frozen=True, slots=True)
class Join:
    """How the results of one call become one value.

    Attributes:
        called: The method, for errors.
        ranks: Ranks whose results are joined, in the order of the value.
        collect: How.
        rows: Rows that each result has to have, or None if none are dropped.
        kept: For each of the ranks, how many of these are no padding.
        transport: What encoded the results on their way here, if anything did.
    """

    called: str
    ranks: tuple[int, ...]
    collect: Mode | Function
    rows: int | None = None
    kept: tuple[int, ...] = ()
    transport: ArgumentTransport | None = None

    def __call__(self, results: Sequence[Any]) -> Any:
        """The value of results that are in the order of `ranks`.

        Raises:
            ResultJoinError: They can't be joined like this.
        """
        kept = [self.without_padding(rank, result) for rank, result in zip(self.ranks, results, strict=True)]
        if isinstance(self.collect, Function):
            return self._made_by(self.collect, kept)
        if self.collect == "first":
            return kept[0]
        return kept if self.collect == "list" else self._joined(self.collect, kept)

    def without_padding(self, rank: int, result: Any) -> Any:
        """The result of a rank without rows that come of padding.

        Raises:
            ResultJoinError: It has not a row for each row that the rank got.
        """
        if self.rows is None or result is None:
            return result
        try:
            result, found = self._counted(result)
        except Exception as error:
            raise ResultJoinError(f"{self.called}: {error}; {self._whose(rank)}") from error
        if found != self.rows:
            raise ResultJoinError(f"{self.called}: {found} rows are too many or too few; {self._whose(rank)}")
        kept = self.kept[self.ranks.index(rank)]
        return result if kept == self.rows else cut_rows(result, 0, kept)

    def _counted(self, result: Any) -> tuple[Any, int]:
        """A result, decoded where it has no rows as it came, and their number."""
        try:
            return result, count_rows(result, "the result")
        except (TypeError, ValueError):
            if self.transport is None:
                raise
            decoded = self.transport.decode(result)
            return decoded, count_rows(decoded, "the result")

    def _decoded(self, results: list[Any]) -> list[Any]:
        return results if self.transport is None else [self.transport.decode(result) for result in results]

    def _joined(self, mode: Mode, results: list[Any]) -> Any:
        without = [rank for rank, result in zip(self.ranks, results, strict=True) if result is None]
        if without and len(without) < len(results):
            raise self._error(f"ranks {without} returned None, and the others did not")
        if mode == "concat" and self.rows is not None:  # a rank may have had nothing but padding
            pairs = zip(self.kept, results, strict=True)
            results = [result for kept, result in pairs if kept]
        try:
            return self._as_they_are_or_decoded(_JOINS[mode], results)
        except Exception as error:
            raise self._error(f"{type(error).__name__}: {error}") from error

    def _as_they_are_or_decoded(self, join: _Joining, results: list[Any]) -> Any:
        """Handles are joined without their values where that goes; not beside values, nor added up."""
        try:
            return join(results, "the results")
        except Exception:
            if self.transport is None:
                raise
            return join(self._decoded(results), "the results")

    def _made_by(self, function: Function, results: list[Any]) -> Any:
        if function.fn is None:
            raise self._error(function.why_not)
        try:
            results = self._decoded(results)
        except Exception as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        try:
            return function.fn(results)
        except Exception as error:
            error.add_note(f"(raised by {function.name}, which joins the results of {self.called})")
            raise

    def _whose(self, rank: int) -> str:
        return (
            f"with pad=True the result of rank {rank} needs one for each of the {self.rows} rows that it was "
            "given, so that those of padding can be dropped"
        )

    def _error(self, why: str) -> ResultJoinError:
        how = self.collect.name if isinstance(self.collect, Function) else self.collect
        return ResultJoinError(
            f"the results of {self.called} (ranks {list(self.ranks)}) can't be joined by {how!r}: {why}\n"
            "as_completed() of the same future gives them one by one"
        )


_JOINS: Mapping[str, _Joining] = {
    "concat": join_rows,
    "sum": add_up,
    "mean": average,
}
