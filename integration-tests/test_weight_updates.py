"""Weights from a sharded trainer to two groups of generators, while processes die and loads fail."""

import pytest
import torch
from weight_workers import Generator, Trainer

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory, WeightUpdateError, sync_weights
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 300.0


class Crew:
    def __init__(self, directory, trainer, generators):
        self.directory, self.trainer, self.generators = directory, trainer, generators

    def sync(self):
        names = {"prepare": "prepare_weights", "pause": "pause", "resume": "resume"}
        return sync_weights(
            self.trainer, self.generators, directory=self.directory, timeout_s=TIMEOUT_S, **names
        )

    def learn(self):
        self.trainer.call("step").get_results(timeout=TIMEOUT_S)
        return self.trainer.on(ranks=[0]).call("output").get_results(timeout=TIMEOUT_S)[0]

    def served(self, group):
        """What a group generates: nothing is paused."""
        ((paused, versions, output),) = group.call("generate").get_results(timeout=TIMEOUT_S)
        assert not paused
        assert len(set(versions)) == 1
        return versions[0], output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["object_store", pytest.param("shared_memory", marks=pytest.mark.long)])
@pytest.mark.hostile
def test_all_generators_serve_one_version_whatever_fails(local_ray, kind):
    with (
        WeightDirectory.start(keep=2) as directory,
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, bundle_indices_list=[(0, [0]), (0, [1])], directory=directory, kind=kind
        ) as trainer,
        RayWorkerGroup(
            cluster, Generator, bundle_indices_list=[(0, [2])], directory=directory, kind=kind
        ) as first,
        RayWorkerGroup(
            cluster, Generator, bundle_indices_list=[(0, [3])], directory=directory, kind=kind
        ) as second,
    ):
        crew = Crew(directory, trainer, [first, second])
        old = crew.learn()
        assert crew.sync().version == 1
        assert all_serve(crew, 1, old)
        digests = {g.call("digest").get_results(timeout=TIMEOUT_S)[0] for g in crew.generators}
        assert digests == set(trainer.call("digest").get_results(timeout=TIMEOUT_S))

        new = crew.learn()
        second.call("arm", "raises").get_results(timeout=TIMEOUT_S)
        with pytest.raises(Exception, match="the engine has no room"):
            crew.sync()
        assert all_serve(crew, 1, old)
        version = crew.sync().version
        assert all_serve(crew, version, new)

        later = crew.learn()
        second.call("arm", "dies").get_results(timeout=TIMEOUT_S)
        with pytest.raises(Exception) as died:
            crew.sync()
        assert not isinstance(died.value, WeightUpdateError)
        served, output = crew.served(first)
        assert served == version and torch.equal(output, new)
        assert second.restart_failed_workers() == [0]
        assert second.call("catch_up").get_results(timeout=TIMEOUT_S) == [version]
        assert all_serve(crew, version, new)
        version = crew.sync().version
        assert all_serve(crew, version, later)

        crew.learn()
        trainer.call("arm", 1).get_results(timeout=TIMEOUT_S)
        with pytest.raises(Exception) as died:
            crew.sync()
        assert not isinstance(died.value, WeightUpdateError)
        assert all_serve(crew, version, later)
        assert directory.latest == version


def all_serve(crew, version, output):
    served = [crew.served(group) for group in crew.generators]
    assert [number for number, _ in served] == [version] * len(served)
    return all(torch.allclose(found, output) for _, found in served)
