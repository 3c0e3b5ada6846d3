"""Worker groups whose workers run in environments of their own."""

import pytest

from raycrew.cluster_core import RayVirtualCluster
from raycrew.venv_manager import (
    ACTOR_ENVIRONMENT_REGISTRY,
    ActorEnvironmentRegistry,
    EnvironmentSpec,
    RegistryEnvironmentProvider,
    ResolutionError,
)
from raycrew.venv_manager.testing import LocalIndex
from raycrew.worker_groups import EnvironmentProviderError, RayWorkerGroup


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYCREW_VENV_DIR", str(tmp_path / "store"))
    local = LocalIndex(tmp_path)
    local.add("palette", "1.0")
    local.add("palette", "2.0")
    return local


def with_packages(index, *requirements):
    return EnvironmentSpec.requirements(requirements, indexes=(index.url,))


def painters_provider(index, *requirements, module="palette_workers"):
    registry = ActorEnvironmentRegistry()
    registry.register(f"{module}.Painter", with_packages(index, *requirements))
    return RegistryEnvironmentProvider(registry)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "more"),
    [
        pytest.param("palette_lists", [], id="of lists"),
        pytest.param("palette_workers", ["torch"], id="of tensors", marks=pytest.mark.long),
    ],
)
def test_two_groups_run_two_versions_of_a_package_and_exchange_a_batch(
    local_ray, index, monkeypatch, module, more
):
    """One of them by a provider that it is given, the other by what is registered and installed."""
    environments = painters_provider(index, "palette==1.0", *more, module=module)
    restoring = with_packages(index, "palette==2.0", *more)
    monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, f"{module}.Restorer", restoring)
    with (
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, f"{module}.Painter", environments=environments) as painters,
        RayWorkerGroup(cluster, f"{module}.Restorer", environments="auto") as restorers,
    ):
        assert painters.call("version").get_results(timeout=60) == ["1.0", "1.0"]
        assert restorers.call("version").get_results(timeout=60) == ["2.0", "2.0"]
        painted = painters.run_all_workers_single_data("paint", rows=3)
        seen = restorers.run_all_workers_multiple_data("read", batch=list(painted)).get_results(timeout=60)
        assert seen == [("2.0", sum(range(12)), ["1.0"] * 3)] * 2


@pytest.mark.hostile
def test_an_environment_that_cannot_be_built_fails_before_any_actor_and_frees_the_bundles(local_ray, index):
    environments = painters_provider(index, "palette==3.0", "torch")
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        with pytest.raises(EnvironmentProviderError, match=r"palette==3\.0") as raised:
            RayWorkerGroup(cluster, "palette_workers.Painter", environments=environments)
        assert isinstance(raised.value.__cause__, ResolutionError)
        assert not cluster.holders()
