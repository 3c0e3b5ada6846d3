"""An update of weights between groups on Ray that is awaited, cancelled, and awaited once more."""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from weight_workers import Follower

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, sync_weights_async
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 120.0


class Trainer:
    """Publishes other weights each time, once it may."""

    def __init__(self, directory: WeightDirectory, folder: str) -> None:
        self.publisher = WeightPublisher(directory=directory)
        self.folder, self.step = Path(folder), 0

    def publish_weights(self):
        self.step += 1
        (self.folder / f"begun-{self.step}").touch()
        while not (self.folder / f"go-{self.step}").exists():
            time.sleep(0.01)
        return self.publisher.publish({"scale": torch.full((3,), self.step), "bias": torch.zeros(2)})


async def appears(path: Path) -> int:
    """How often the event loop went round until a file was there."""
    turns = 0
    while not path.exists():
        await asyncio.sleep(0.01)
        turns += 1
        assert turns < 100 * TIMEOUT_S
    return turns


@pytest.mark.slow
@pytest.mark.long
def test_an_update_between_groups_is_awaited_cancelled_and_awaited_again(local_ray, tmp_path):
    with (
        WeightDirectory.start() as directory,
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, bundle_indices_list=[(0, [0])], directory=directory, folder=str(tmp_path)
        ) as trainer,
        RayWorkerGroup(
            cluster, Follower, bundle_indices_list=[(0, [1]), (0, [2])], directory=directory, follows=False
        ) as generators,
    ):

        def sync():
            options = {"directory": directory, "prepare": "prepare_weights", "timeout_s": TIMEOUT_S}
            return asyncio.create_task(sync_weights_async(trainer, generators, **options))

        async def generated(version):
            return await generators.call("generate", version)

        async def run():
            first = sync()
            assert await appears(tmp_path / "begun-1") > 0, "the event loop goes on meanwhile"
            (tmp_path / "go-1").touch()
            assert (await first).version == 1
            assert await generated(1) == [(1, [1.0] * 3 + [0.0] * 2)] * 2
            given_up = sync()
            await appears(tmp_path / "begun-2")
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            (tmp_path / "go-2").touch()
            assert await generated(1) == [(1, [1.0] * 3 + [0.0] * 2)] * 2, "they serve what they had"
            (tmp_path / "go-3").touch()
            last = await sync()
            assert last.version > 1
            assert await generated(last.version) == [(last.version, [3.0] * 3 + [0.0] * 2)] * 2

        asyncio.run(run())
        aborted = [status.reason for status in directory.status() if status.state == "aborted"]
        assert aborted == ["the synchronisation was cancelled"]
