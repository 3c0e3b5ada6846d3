"""What a generator of any kind does with versions that come over a route: for tests."""

import os
import signal
from contextlib import contextmanager

import pytest
from generation_conformance import LONG, assert_plain
from generation_stage import PROMPTS, Trainer, batch_of, group_stage, rows_of

from raycrew.tensor_transport import WeightRoute, WeightUpdateError
from raycrew.tensor_transport.errors import PeerLostError
from raycrew.worker_groups import WorkerFailureError


class KillingTrainer(Trainer):
    """Has a process killed, if it is told which, when the second bucket of a version is put or packed."""

    victim, begun = None, 0

    def __init__(self, directory, store):
        super().__init__(directory, store)
        put, reserve = store.put_tensor, store.reserve_tensor
        store.put_tensor = lambda data: self._begin() or put(data)
        store.reserve_tensor = lambda size: (found := reserve(size)) and (self._begin() or found)

    def publish_weights(self):
        self.begun = 0
        return super().publish_weights()

    def _begin(self):
        self.begun += 1
        if self.begun == 2 and self.victim is not None:
            os.kill(self.victim, signal.SIGKILL)
            self.victim = None


@contextmanager
def routed_stage(worker, bundles=1, **how):
    """Generators on Ray that hold no version yet, and may die often."""
    options = {"synced": False, "routed": True, "trainer": KillingTrainer, "max_restarts": 9}
    with group_stage(worker, bundles, name_prefix="routed", **options, **how) as stage:
        yield stage


@contextmanager
def over(stage, transport, device="cpu"):
    """Versions come over a transport within the context."""
    stage.model.device = device
    with WeightRoute(transport, device=device) as stage.route:
        try:
            yield
            assert stage.route.choice.name == {"auto": "shared_memory"}.get(transport, transport)
        finally:
            stage.route = None


def assert_generates(stage, sampling=LONG):
    """All replicas say what the trainer's own forward pass with its last version does."""
    parts = stage.generators.begin(batch_of(), sampling).get_results()
    rows = [row for part in parts for row in rows_of(part)]
    assert [row[0] for row in rows] == list(range(len(PROMPTS)))
    for row in rows:
        assert set(row[4]) == {stage.version}
        assert_plain(stage, PROMPTS, row)


def check_updates(stage, transport, device="cpu"):
    """Before and in the middle of a call, after a sleep, and after a death."""
    with over(stage, transport, device):
        stage.sync()
        assert_generates(stage)
        before, future = stage.version, stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        stage.sync()
        for row in rows_of(future.result(120)):
            assert set(row[4]) <= {before, stage.version}
            assert_plain(stage, PROMPTS, row)
        stage.generators.call("sleep")
        with pytest.raises(WorkerFailureError, match="wake"):
            stage.sync()
        stage.generators.call("wake")
        assert_generates(stage)  # it has fetched alone what is kept
        stage.sync()
        assert_generates(stage)


def check_death_between(stage, transport):
    """One that dies between updates is replaced, has the latest version and takes the next."""
    with over(stage, transport):
        stage.sync()
        os.kill(last_of(stage), signal.SIGKILL)
        assert_generates(stage)
        stage.sync()
        assert_generates(stage)


def check_death_within(stage, transport):
    """One that dies within an update is replaced, and all have the version before until the next one."""
    with over(stage, transport):
        before = stage.sync()
        stage.model.victim = last_of(stage)
        with pytest.raises((WorkerFailureError, WeightUpdateError, PeerLostError)):  # who sees it first
            stage.sync()
        assert stage.version == before
        assert_generates(stage)
        assert stage.sync() == stage.version == before + 2
        assert_generates(stage)


def last_of(stage):
    """The process of the last replica."""
    last = stage.generators.group.on(ranks=[stage.generators.leaders[-1]])
    return last.call("pid").get_results()[0]
