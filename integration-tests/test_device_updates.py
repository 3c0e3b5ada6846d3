"""Weights between groups of workers from device to device, over each transport that can; on the CPU, too."""

import os
import signal
import time
from contextlib import ExitStack, contextmanager

import pytest

from device_workers import Generator, Trainer
from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.tensor_transport import WeightDirectory, WeightRoute, sync_weights
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 60.0


class Crew:
    """A trainer and a generator, for all routes that their processes can go over."""

    def __init__(self, stack, device, over_nccl):
        self.device = device
        self.directory = stack.enter_context(WeightDirectory.start(keep=2))
        placed = {"use_gpus": device == "cuda", "max_colocated_worker_groups": 3}
        cluster = stack.enter_context(RayVirtualCluster([1], **placed))
        how = {"directory": self.directory, "device": device, "over_nccl": over_nccl, "devices": 1}
        self.trainer, self.generator = (
            stack.enter_context(RayWorkerGroup(cluster, kind, **how)) for kind in (Trainer, Generator)
        )

    def update(self, seed, route):
        self.trainer.call("learn", seed).get_results(timeout=TIMEOUT_S)
        options = {"prepare": "prepare_weights", "timeout_s": TIMEOUT_S, "directory": self.directory}
        return sync_weights(self.trainer, [self.generator], route=route, **options).version

    def asked(self, method, *args):
        (found,) = self.generator.call(method, *args).get_results(timeout=TIMEOUT_S)
        return found

    def replace_generator(self):
        os.kill(self.asked("pid"), signal.SIGKILL)
        until = time.monotonic() + TIMEOUT_S
        while not self.generator.restart_failed_workers():
            assert time.monotonic() < until, "its death was not noticed"
            time.sleep(0.05)


class Crews:
    """One at a time, which stays from test to test: processes that use a device take long to start."""

    def __init__(self, session):
        self._session, self._stack = session, ExitStack()
        self._kind, self._crew = None, None

    @contextmanager
    def of(self, *kind):
        """A crew of a kind; after a failure the next test has another one."""
        if kind != self._kind:
            self.close()
            self._stack.enter_context(connected(self._session))
            self._kind, self._crew = kind, Crew(self._stack, *kind)
        try:
            yield self._crew
        except BaseException:
            self.close()
            raise

    def close(self):
        self._kind = self._crew = None
        self._stack.close()


@pytest.fixture(scope="module")
def crews(local_ray_session):
    made = Crews(local_ray_session)
    yield made
    made.close()


ON_DEVICE = ("auto", "cuda_ipc", "shared_memory", "gloo", "nccl")


@pytest.mark.hostile
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("device", "transport"),
    [
        ("cpu", "auto"),
        pytest.param("cpu", "gloo", marks=pytest.mark.long),
        *(pytest.param("cuda", transport, marks=pytest.mark.gpu) for transport in ON_DEVICE),
    ],
)
def test_weights_of_a_device_arrive_roll_back_and_are_caught_up_with(crews, device, transport):
    """All are on one device, which is one for each of them to NCCL."""
    with (
        crews.of(device, transport == "nccl") as crew,
        WeightRoute(transport, device=device, timeout_s=TIMEOUT_S) as route,
    ):
        first = crew.update(1, route)
        assert crew.asked("holds", 1)
        auto = {"cpu": "shared_memory", "cuda": "cuda_ipc"}[device]
        assert route.choice.name == (auto if transport == "auto" else transport)
        assert crew.asked("explain") == route.explain()
        crew.asked("arm")
        with pytest.raises(Exception, match="no room"):
            crew.update(2, route)
        assert crew.asked("holds", 1)
        version = crew.update(3, route)
        assert version > first and crew.asked("holds", 3)
        crew.replace_generator()
        assert crew.asked("catch_up") == version and crew.asked("holds", 3)
        assert crew.update(4, route) > version and crew.asked("holds", 4)
