"""Workers that die on the way: those that the run kills itself, and what is told of each."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from grpo.history import Event
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError


class Deaths:
    """Kills a worker where that is asked for, and tells in one line of each that died and came back.

    Args:
        kill: In which round rank 0 of a group is to be killed, by the group's name.
        tell: Called with the line.
        clock: In seconds.
    """

    def __init__(
        self,
        kill: Mapping[str, int],
        tell: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.events: list[Event] = []
        self.count = 0
        self._to_kill, self._tell, self._clock = dict(kill), tell, clock
        self._killed: set[int] = set()
        self._untold: list[tuple[WorkerFailureError, float]] = []

    def note(self, failure: WorkerFailureError) -> None:
        """A worker died: what a group's `on_worker_failure` calls."""
        self._untold.append((failure, self._clock()))
        self.count += 1

    @contextmanager
    def strike(self, group: RayWorkerGroup, step: int) -> Iterator[None]:
        """Kill the group's rank 0 as soon as the calls of this block are sent, if this is the round."""
        if self._to_kill.get(group.name) != step:
            yield
            return
        del self._to_kill[group.name]  # A round that is repeated is spared.
        victims = self.victims(group)
        self._killed.update(victims)
        yield
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    def victims(self, group: RayWorkerGroup) -> list[int]:
        """Whom to kill: the process of rank 0."""
        found: list[int] = group.on(ranks=[0]).call("pid").get_results()
        return found

    def tell(self, step: int, standing: str) -> None:
        """Tell of all who died since the last time: they are back, and stand where it is said."""
        while self._untold:
            failure, since = self._untold.pop(0)
            seconds = self._clock() - since
            worker = f"{failure.group_name} {failure.rank}"
            how = "was killed" if failure.pid in self._killed else "died"
            what = (
                f"step {step}: {worker} (process {failure.pid}) {how} during {failure.method}; "
                f"restarted in {seconds:.1f} s, {standing}"
            )
            self.events.append(Event(step, worker, seconds, what))
            self._tell(what)
