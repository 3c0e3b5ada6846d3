"""The one recorder of this process, which is there while anybody listens."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from raycrew.worker_groups._health.observers import observed
from raycrew.worker_groups._health.timeline.questions import NodeWorkers
from raycrew.worker_groups._health.timeline.recorder import Listener, Recorder
from raycrew.worker_groups._ray import PerProcess

_lock = PerProcess(threading.RLock)  # a signal's handler may end a timeline while one is made or ended


@dataclass(frozen=True, slots=True)
class Losses:
    """What is not known, and how well the rest is.

    Attributes:
        calls: How many notes came too quickly, or were overwritten by workers before they were asked for.
        bounds_s: By node, how wrong its times may be.
    """

    calls: int = 0
    bounds_s: dict[str, float] = field(default_factory=dict)


class _Shared(Recorder):
    """A recorder of calls on Ray."""

    def __init__(self) -> None:
        self.nodes = NodeWorkers()
        super().__init__(self.nodes)

    def losses(self, before: int = 0) -> Losses:
        return Losses(self.dropped + self.nodes.lost - before, self.nodes.clocks.bounds())


class Subscription:
    """Some listeners of this process's recorder, until they leave."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        with _lock.here:
            now = observed.by
            self._recorder = now if isinstance(now, _Shared) else _Shared()
            self._before = self._recorder.losses().calls
            try:
                for listener in listeners:
                    self._recorder.listen(listener)
            except BaseException:  # an interrupt: nobody would have them leave
                self._recorder.leave(*listeners)
                raise

    def look(self) -> None:
        """Have the listeners told of what is known by now."""
        self._recorder.look()

    def losses(self) -> Losses:
        """What got lost since this began."""
        return self._recorder.losses(self._before)

    def end(self) -> Losses:
        """Have the listeners told of the rest, and leave."""
        with _lock.here:
            self._recorder.leave(*self._listeners)
        return self.losses()
