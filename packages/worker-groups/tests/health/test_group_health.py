"""What a group tells of its workers' health while some are being replaced; no Ray is needed."""

import pytest

from raycrew.worker_groups._health import GroupHealth, Workers
from raycrew.worker_groups._health.reports import RunningCall, Seen
from raycrew.worker_groups._ranks import WorkerFacts


class Group(GroupHealth):
    """Its worker is replaced while its watch is asked."""

    def __init__(self):
        self.workers = Workers([WorkerFacts("a", "10.0.0.1", 1)], ["old"])

    def _open(self):
        pass

    def _workers(self):
        return self.workers

    def _sights(self, workers, timeout_s):
        self.workers = Workers([WorkerFacts("b", "10.0.0.2", 2)], ["new"])
        silent = workers.handles == ["old"]
        return {0: Seen(True, True, calls=(RunningCall("train", 1, 9.0, 9.0),) if silent else ())}

    def _answers(self, workers, ranks, timeout_s):
        return dict.fromkeys(ranks, "ready" if workers.handles == ["new"] else "dead")


@pytest.mark.hostile
def test_a_verdict_names_the_worker_that_it_is_of():
    group = Group()
    stuck = group.detect_stuck_workers(1.0)[0]
    assert (stuck.pid, stuck.node_id) == (1, "a")
    assert group.detect_stuck_workers(1.0) == {}
    assert group.get_worker_status() == {0: "ready"}
