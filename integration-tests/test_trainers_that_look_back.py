"""A trainer that is lost while it looks at its tensors again, and generators that loaded them by then."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver, sync_weights
from raycrew.tensor_transport.weights._publishing.source import SourceWatch
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 120.0


class Trainer:
    """Signals itself as soon as a generator has loaded what it looks at."""

    def __init__(self, directory, loaded):
        self.publisher = WeightPublisher(directory=directory, bucket_bytes=1 << 10)
        self.value, check = 0.0, SourceWatch.check
        self.signal = None

        def look(watch, **how):
            while self.signal and not Path(loaded).exists():
                time.sleep(0.01)
            if self.signal:
                os.kill(os.getpid(), self.signal)
            check(watch, **how)

        SourceWatch.check = look

    def arm(self, number):
        self.signal = number
        return os.getpid()

    def publish_weights(self):
        self.value += 1
        return self.publisher.publish({f"{i}": torch.full((1 << 10,), self.value) for i in range(4)})


class Generator:
    def __init__(self, directory, loaded):
        self.held, self.paused, self.loaded, self.leaves = {}, False, loaded, False
        self.receiver = WeightReceiver(self.load, directory=directory, rollback="shadow")

    def load(self, tensors):
        assert self.paused
        self.held |= {name: float(tensor.mean()) for name, tensor in tensors}
        if self.leaves:
            Path(self.loaded).touch()

    def arm(self):
        self.leaves = True

    def prepare_weights(self, version):
        return self.receiver.prepare(version)

    def apply_weights(self, version):
        return self.receiver.apply(version)

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def serve(self):
        return self.paused, self.receiver.require(), set(self.held.values())


@pytest.mark.hostile
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_generators_return_to_what_they_served(local_ray, tmp_path, number):
    loaded = str(tmp_path / "loaded")
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, bundle_indices_list=[[0]], directory=directory, loaded=loaded
        ) as trainer,
        RayWorkerGroup(
            cluster, Generator, bundle_indices_list=[[1], [2]], directory=directory, loaded=loaded
        ) as generators,
    ):
        names = {"prepare": "prepare_weights", "pause": "pause", "resume": "resume"}
        assert sync_weights(trainer, generators, directory=directory, **names).version == 1
        generators.call("arm").get_results(timeout=TIMEOUT_S)
        (pid,) = trainer.call("arm", number).get_results(timeout=TIMEOUT_S)
        try:
            timeout_s = TIMEOUT_S if number == signal.SIGKILL else 10.0
            with pytest.raises(Exception) as caught:
                sync_weights(trainer, generators, directory=directory, timeout_s=timeout_s, **names)
        finally:
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGKILL)
        assert Path(loaded).exists() and directory.latest == 1
        assert "publish_weights" in str(caught.value)
        assert "returned to version 1" in "".join(caught.value.__notes__)
        assert generators.call("serve").get_results(timeout=TIMEOUT_S) == [(False, 1, {1.0})] * 2
