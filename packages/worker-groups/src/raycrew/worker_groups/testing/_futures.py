"""Results of a call on workers of this process."""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    CancelledError,
    Future,
    wait,
)
from typing import Any, Self

from raycrew.worker_groups._calls import (
    MultiWorkerFuture,
    failure,
    first_failure,
    left,
    when_done,
)
from raycrew.worker_groups.errors import WorkerFailureError, combine


class InProcessFuture(MultiWorkerFuture[Any, Any]):
    """A `MultiWorkerFuture` of this process: a list of `concurrent.futures.Future`, not for `ray.get`.

    Items of generator methods come when the generator has ended.
    """

    def cancel(self) -> None:
        """See `MultiWorkerFuture.cancel`; the cause is `concurrent.futures.CancelledError` here."""
        for call in self:
            call.cancel()

    @property
    def _ends(self) -> list[Any]:
        return list(self)

    def _wait_for(
        self,
        ends: Sequence[Any],
        count: int,
        timeout: float | None,
        *,
        fetch_local: bool = False,  # noqa: ARG002 - all are of this process
    ) -> Collection[Any]:
        # Balancers ask for one or for all.
        return wait(ends, timeout, FIRST_COMPLETED if count == 1 else ALL_COMPLETED).done

    def _died(self, end: Any) -> bool:  # noqa: ARG002
        return False

    def _own_id(self) -> bytes:
        return getattr(self[0], "call_id", b"")  # `__init__` is no call

    def wait(self, timeout: float | None = None) -> bool:
        """See `MultiWorkerFuture.wait`."""
        return not wait(self, left(self._until(timeout))).not_done

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """See `MultiWorkerFuture.add_done_callback`."""
        when_done(list(self), lambda: callback(self), f"the callback of {self!r}")

    def _check(self) -> None:
        pass

    async def _quick(self) -> None:
        await first_failure(list(self), self._deadline, self._check)

    def _gathered(self, deadline: float | None) -> dict[int, Any]:
        return dict(self._done_in_turn(deadline))

    def _outcomes(self, deadline: float | None) -> dict[int, Any]:
        wait(self, left(deadline))
        by_rank = dict(zip(self.called_workers, self, strict=True))
        late = {rank: self._timed_out([rank]) for rank, call in by_rank.items() if not call.done()}
        errors = {rank: _error_of(call) for rank, call in by_rank.items() if rank not in late}
        failed = {rank: self._told(self._failure(rank, error)) for rank, error in errors.items() if error}
        well = {rank: by_rank[rank].result() for rank in errors if rank not in failed}
        return {**late, **failed, **well}

    def _pairs(self, timeout: float | None) -> Generator[tuple[int, Any], None, None]:
        for rank, value in self._done_in_turn(self._until(timeout)):
            if rank in self.return_from_workers:
                yield from (
                    ((rank, item) for item in value) if self.is_stream else [(rank, self._own(rank, value))]
                )

    def _done_in_turn(self, deadline: float | None) -> Iterator[tuple[int, Any]]:
        rank_of = dict(zip(self, self.called_workers, strict=True))
        waiting = set(self)
        while waiting:
            done, waiting = wait(waiting, timeout=left(deadline), return_when=FIRST_COMPLETED)
            if not done:
                raise self._timed_out([rank_of[call] for call in waiting])
            failed = {rank_of[call]: error for call in done if (error := _error_of(call))}
            if failed:
                raise self._told(combine([self._failure(*each) for each in sorted(failed.items())]))
            yield from [(rank_of[call], call.result()) for call in done]

    def _failure(self, rank: int, error: BaseException) -> WorkerFailureError:
        return failure(self._places[rank], error, self.method, elapsed_s=time.monotonic() - self._sent_at)


def _error_of(call: Future[Any]) -> BaseException | None:
    try:
        return call.exception()
    except CancelledError as error:
        return error
