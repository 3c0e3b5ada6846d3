"""Weights from a sharded trainer to groups of generators that are split otherwise, while processes die."""

import pytest
import torch
from weight_workers import Generator, Trainer

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import (
    WeightDirectory,
    WeightRoute,
    WeightUpdateError,
    digest_weights,
    sync_weights,
)
from raycrew.worker_groups import RayWorkerGroup

TIMEOUT_S = 300.0


class Crew:
    def __init__(self, directory, route, trainer, generators):
        self.directory, self.route, self.trainer, self.generators = directory, route, trainer, generators

    def sync(self):
        names = {"prepare": "prepare_weights", "pause": "pause", "resume": "resume"}
        return sync_weights(
            self.trainer,
            self.generators,
            directory=self.directory,
            route=self.route,
            timeout_s=TIMEOUT_S,
            **names,
        )

    def learn(self):
        self.trainer.call("step").get_results(timeout=TIMEOUT_S)
        return self.trainer.on(ranks=[0]).call("output").get_results(timeout=TIMEOUT_S)[0]

    def served(self, group):
        """What a group generates, its ranks together: nothing is paused."""
        found = group.call("generate").get_results(timeout=TIMEOUT_S)
        assert not any(paused for paused, _, _ in found)
        (version,) = {version for _, versions, _ in found for version in versions}
        return version, sum(output for _, _, output in found)

    def all_serve(self, version, output):
        for group in self.generators:
            served, found = self.served(group)
            assert served == version
            assert torch.allclose(found, output, atol=1e-5)

    def told(self):
        """What each process of all groups says about the route."""
        groups = (self.trainer, *self.generators)
        return {text for group in groups for text in group.call("explain").get_results(timeout=TIMEOUT_S)}


def whole(group):
    """The model, put together from the ranks of a group."""
    parts = group.call("parts").get_results(timeout=TIMEOUT_S)
    dims = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    joined = {name: torch.cat([part[name] for part in parts], dim) for name, dim in dims.items()}
    return joined | {"2.bias": parts[-1]["2.bias"]}


@pytest.mark.hostile
def test_a_generator_that_dies_within_an_update_is_replaced_and_serves_what_all_do(local_ray):
    with (
        WeightDirectory.start(keep=2) as directory,
        WeightRoute("gloo") as route,
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Trainer, bundle_indices_list=[[0], [1]], directory=directory) as trainer,
        RayWorkerGroup(cluster, Generator, bundle_indices_list=[[2], [3]], directory=directory) as generator,
    ):
        crew = Crew(directory, route, trainer, [generator])
        old = crew.learn()
        assert crew.sync().version == 1
        crew.all_serve(1, old)
        assert crew.told() == {route.explain()}
        new = crew.learn()
        kill_within_an_update(crew, generator)
        assert generator.restart_failed_workers() == [1]
        assert generator.on(ranks=[1]).call("catch_up").get_results(timeout=TIMEOUT_S) == [1]
        crew.all_serve(1, old)
        crew.all_serve(crew.sync().version, new)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_all_generators_serve_one_version_whatever_fails(local_ray, transport):
    with (
        WeightDirectory.start(keep=2) as directory,
        WeightRoute(transport) as route,
        RayVirtualCluster([5], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, bundle_indices_list=[(0, [0]), (0, [1])], directory=directory
        ) as trainer,
        RayWorkerGroup(cluster, Generator, bundle_indices_list=[(0, [2])], directory=directory) as first,
        RayWorkerGroup(
            cluster, Generator, bundle_indices_list=[(0, [3]), (0, [4])], directory=directory
        ) as second,
    ):
        crew = Crew(directory, route, trainer, [first, second])
        old = crew.learn()
        assert crew.sync().version == 1
        crew.all_serve(1, old)
        digests = {digest_weights(whole(group)) for group in crew.generators}
        assert digests == set(trainer.call("digest").get_results(timeout=TIMEOUT_S))
        assert route.choice.name == {"gloo": "gloo", "auto": "shared_memory"}[transport]
        assert crew.told() == {route.explain()}

        new = crew.learn()
        second.on(ranks=[1]).call("arm", "raises").get_results(timeout=TIMEOUT_S)
        with pytest.raises(Exception, match="the engine has no room"):
            crew.sync()
        crew.all_serve(1, old)
        version = crew.sync().version
        crew.all_serve(version, new)

        later = crew.learn()
        kill_within_an_update(crew, second)
        served, output = crew.served(first)
        assert served == version and torch.allclose(output, new, atol=1e-5)
        assert second.restart_failed_workers() == [1]
        assert second.on(ranks=[1]).call("catch_up").get_results(timeout=TIMEOUT_S) == [version]
        crew.all_serve(version, new)
        version = crew.sync().version
        crew.all_serve(version, later)

        latest = crew.learn()
        trainer.call("arm", 1).get_results(timeout=TIMEOUT_S)
        with pytest.raises(Exception) as died:
            crew.sync()
        assert not isinstance(died.value, WeightUpdateError)
        crew.all_serve(version, later)
        assert directory.latest == version
        assert trainer.restart_failed_workers() == [1]
        crew.all_serve(crew.sync().version, latest)


def kill_within_an_update(crew, group):
    """Rank 1 of a group dies while it fetches."""
    group.on(ranks=[1]).call("arm", "dies").get_results(timeout=TIMEOUT_S)
    with pytest.raises(Exception) as died:
        crew.sync()
    assert not isinstance(died.value, WeightUpdateError)
