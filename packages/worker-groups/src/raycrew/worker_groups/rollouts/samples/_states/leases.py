"""Who has which samples at the moment, and until when. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from raycrew.worker_groups.errors import SampleLeaseError
from raycrew.worker_groups.rollouts.samples._states.sample import Use

_SLACK = 64


@dataclass(eq=False, slots=True)
class Lease:
    """Samples that were handed out together.

    Attributes:
        use: What for.
        ids: Those that are still out.
        until: When they come back by themselves, by the monotonic clock.
    """

    use: Use
    ids: dict[int, None]  # in order
    until: float


class Leases:
    """The leases of a queue, by a name that whoever takes one chooses."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return sum(len(lease.ids) for lease in self._leases.values())

    def __contains__(self, name: object) -> bool:
        return name in self._leases

    def __iter__(self) -> Iterator[tuple[Use, list[int]]]:
        for lease in self._leases.values():
            yield lease.use, list(lease.ids)

    def mend(self) -> None:
        """Find out anew when they end."""
        self._ends = [(lease.until, name) for name, lease in self._leases.items()]
        heapify(self._ends)

    def begin(self, name: str, use: Use, ids: Iterable[int], until: float) -> None:
        """Hand samples out."""
        self._leases[name] = Lease(use, dict.fromkeys(ids), until)
        self._note_end(name, until)

    def get(self, name: str) -> Lease:
        """A lease that goes on.

        Raises:
            SampleLeaseError: It has ended.
        """
        try:
            return self._leases[name]
        except KeyError:
            raise SampleLeaseError(
                "this batch has no lease any more, so its samples may have been handed out again: it was "
                "settled before, or it took too long (a longer `lease_s`, or renew() in time)"
            ) from None

    def check(self, name: str, ids: Iterable[int], columns: int) -> None:
        """Make sure that somebody has these samples, to add these columns to them.

        Raises:
            SampleLeaseError: The lease has ended, or is of other samples or for something else.
        """
        lease = self.get(name)
        if lease.use.adds != columns:
            raise SampleLeaseError("columns are added to a batch that was asked for to add them, all at once")
        if strange := [sample for sample in ids if sample not in lease.ids]:
            raise SampleLeaseError(f"samples {strange[:8]} are not in this batch, or no longer")

    def take(self, name: str, ids: Iterable[int] | None) -> list[int]:
        """Take samples out of a lease, all by default; it ends with its last one.

        Raises:
            SampleLeaseError: It has ended, or one of them is not of it.
        """
        lease = self.get(name)
        wanted = list(lease.ids) if ids is None else list(ids)
        if strange := [sample for sample in wanted if sample not in lease.ids]:
            raise SampleLeaseError(f"samples {strange[:8]} are not in this batch, or no longer")
        for sample in wanted:
            lease.ids.pop(sample, None)
        if not lease.ids:
            del self._leases[name]
        return wanted

    def renew(self, name: str, until: float) -> None:
        """Have a lease end later.

        Raises:
            SampleLeaseError: It has ended.
        """
        self.get(name).until = until
        self._note_end(name, until)

    def _note_end(self, name: str, until: float) -> None:
        heappush(self._ends, (until, name))
        if len(self._ends) > 2 * len(self._leases) + _SLACK:  # of leases that have ended before
            self.mend()

    def ended(self, now: float) -> Iterator[tuple[str, Lease]]:
        """Leases whose time is over; each is to be taken back by `take` before the next is asked for."""
        while self._ends and self._ends[0][0] <= now:
            _, name = heappop(self._ends)
            lease = self._leases.get(name)
            if lease is not None and lease.until <= now:
                yield name, lease

    def next_end(self) -> float | None:
        """When the next lease may end."""
        return self._ends[0][0] if self._ends else None
