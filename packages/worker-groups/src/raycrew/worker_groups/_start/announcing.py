"""What others see of a group while it starts: published beside the start, and gone however that ends."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from raycrew.cluster_core import ClusterClosedError, Session
from raycrew.worker_groups._health import Publication, StartRecord, WorkerRecord
from raycrew.worker_groups._ray import current_session, own_job
from raycrew.worker_groups._start.record import record_of
from raycrew.worker_groups._start.report import StartupProgress
from raycrew.worker_groups._start.spec import GroupSpec

_APART_S = 0.5  # between two records
_SPARE_S = 60.0  # for the end of workers after the deadline of their start, and for clocks that differ
_NAMED = 4


class Announced(StartupProgress):
    """Tells others of each step as well.

    Args:
        spec: What is to start.
        publication: Where they look.
        n_ranks: How many ranks it is to have.
        progress: What is told beside them.
    """

    def __init__(
        self, spec: GroupSpec, publication: Publication, n_ranks: int, progress: StartupProgress
    ) -> None:
        self._publication, self._shown = publication, progress
        self._session, began = current_session(), time.time()
        until = began + spec.options.init_timeout_s + _SPARE_S
        self._start = StartRecord("", began, until, n_ranks, 0, "", own_job())
        self._record = record_of(spec, 0, ())
        self._waiting: dict[int, str] = {}
        self._changed, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="raycrew-start", daemon=True)

    def step(self, what: str, names: Sequence[str] = ()) -> None:
        """See `StartupProgress`."""
        self._shown.step(what, names)
        self._waiting = dict(enumerate(names))
        self._start = replace(self._start, step=what)
        self._note()

    def advance(self, position: int = 0) -> None:
        """See `StartupProgress`."""
        self._shown.advance(position)
        self._waiting.pop(position, None)
        self._note()

    def located(self, workers: Sequence[WorkerRecord]) -> None:
        """See `StartupProgress`."""
        self._record = replace(self._record, workers=tuple(workers))

    def _note(self) -> None:
        missing = list(self._waiting.values())
        others = f" and {more} more" if (more := len(missing) - _NAMED) > 0 else ""
        n_answered, named = self._start.n_ranks - len(missing), f"{', '.join(missing[:_NAMED])}{others}"
        self._start = replace(self._start, n_answered=n_answered, missing=named)
        self._changed.set()

    def begin(self) -> None:
        """From now on others see it."""
        self._thread.start()

    def stop(self) -> None:
        """What others see last stays."""
        self._is_over.set()
        self._changed.set()

    def end(self) -> None:
        """Others see it no more; its session may have ended, and what they see with it."""
        self.stop()
        if Session.current() == self._session:
            self._publication.end()

    def _run(self) -> None:
        with suppress(ClusterClosedError):
            while self._changed.wait() and not self._is_over.is_set():
                self._changed.clear()
                with self._session.while_connected():
                    self._publication.announce(replace(self._record, start=self._start))
                self._is_over.wait(_APART_S)


def renewal_record(spec: GroupSpec, doing: str, ranks: Sequence[int], n_ranks: int) -> StartRecord:
    """What others see of a group while something is done to some of its ranks.

    Args:
        spec: What the group is.
        doing: What is done, as in "restarting".
        ranks: To whom; none where all get a new place to meet.
        n_ranks: How many ranks there are, or will be.
    """
    what, began = f"ranks {sorted(ranks)}" if ranks else "a new rendezvous", time.time()
    until = began + spec.options.init_timeout_s + _SPARE_S
    return StartRecord(what, began, until, n_ranks, n_ranks, "", own_job(), doing)


@contextmanager
def announced(
    spec: GroupSpec, publication: Publication, n_ranks: int, progress: StartupProgress
) -> Iterator[StartupProgress]:
    """Have others see a start, and nothing of it any more should it fail."""
    news = Announced(spec, publication, n_ranks, progress)
    try:
        news.begin()
        yield news
    except BaseException:
        news.end()
        raise
    finally:
        news.stop()
