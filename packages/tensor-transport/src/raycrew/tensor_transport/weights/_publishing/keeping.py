"""The buckets that a publisher answers for: of versions that it keeps, and of one that was broken off."""

from collections import deque
from collections.abc import Callable

from raycrew.tensor_transport.errors import DirectoryLostError
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.weights._directory import Teller
from raycrew.tensor_transport.weights._update import Bucket, WeightUpdate


class Keeping:
    """Knows which buckets are to be released. What an interrupt or error leaves of it is done next time.

    Args:
        store: Where they are.
        teller: Who says whether anybody needs those of a version that is given up.
        keep: How many versions stay.
    """

    def __init__(self, store: ByteStore, teller: Teller, keep: int) -> None:
        self._store, self._teller, self._keep = store, teller, keep
        self._kept: deque[WeightUpdate] = deque()
        self._begun: tuple[int, list[Bucket]] | None = None
        self._end: Callable[[], object] = _nothing
        self._over: deque[Bucket] = deque()

    @property
    def latest(self) -> WeightUpdate | None:
        """The last version that is kept."""
        return self._kept[-1] if self._kept else None

    def begin(self, number: int) -> list[Bucket]:
        """A version begins: where its buckets are noted."""
        buckets: list[Bucket] = []
        self._begun, self._end = (number, buckets), _nothing
        return buckets

    def add_until(self, end: Callable[[], object]) -> None:
        """Buckets may be noted until this was called; it is again, where an interrupt comes meanwhile."""
        self._end = end

    def complete(self, update: WeightUpdate) -> None:
        """The version is complete, and kept unless a directory does that."""
        if not self._teller.streams:
            self._kept.append(update)
        self._begun, self._end = None, _nothing
        self.release(self._keep)

    def give_up(self, reason: str) -> None:
        """The version that was begun, if there is one that is not complete, never will be.

        Raises:
            DirectoryLostError: Nobody says whether its buckets are needed: they stay until the next time, or
                `forget`.
        """
        if self._begun is not None:
            try:
                self._give_up(*self._begun, reason)
            except DirectoryLostError:
                self._end = _nothing
                raise
            except Exception:
                self._begun, self._end = None, _nothing
                raise
            self._begun, self._end = None, _nothing
        self._release_over()

    def _give_up(self, number: int, buckets: list[Bucket], reason: str) -> None:
        is_kept = any(update.version == number for update in self._kept)
        try:
            is_over = not is_kept and self._teller.abort(number, reason)
        finally:
            self._end()  # A bucket that waited for receivers waits no longer.
        if is_over:
            self._over.extend(buckets)

    def forget(self) -> None:
        """Nobody will tell whether the version that was begun is needed."""
        if self._begun is not None:
            self._over.extend(self._begun[1])
        self._begun, self._end = None, _nothing

    def release(self, keep: int = 0) -> None:
        """Release all versions but the last ones."""
        while len(self._kept) > keep:
            self._over.extend(self._kept[0].buckets)
            self._kept.popleft()
        self._release_over()

    def _release_over(self) -> None:
        while self._over:
            try:
                self._store.release(self._over[0].ticket)
            except Exception:
                self._over.popleft()
                raise
            self._over.popleft()


def _nothing() -> None:
    """Nobody adds buckets."""
