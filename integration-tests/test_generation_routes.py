"""Generation workers get their weights over a route, and join it again when they were made anew."""

import pytest

pytest.importorskip("transformers")

from generation_conformance import Conformance
from generation_echo import MODEL as ECHO
from generation_echo import EchoTrainer, EchoWorker
from generation_readme import block_with
from generation_routes import check_death_between, check_death_within, check_updates, over, routed_stage
from generation_stage import MODEL, PROMPTS, batch_of, local_stage, rows_of

from generation import AsleepError, EngineOptions, GenerationError, start_generators
from generation.transformers_worker import TransformersWorker
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.tensor_transport import RouteStore, digest_weights
from raycrew.tensor_transport.integrations.vllm import greedy_references
from raycrew.tensor_transport.transports import SharedMemoryTransport


@pytest.fixture(scope="module")
def stage(local_ray_session):
    with connected(local_ray_session), routed_stage("transformers", 2) as made:
        yield made


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_versions_come_over_a_route_also_in_a_call_and_after_a_sleep(stage, transport):
    check_updates(stage, transport)


@pytest.mark.hostile
@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.long)])
def test_one_that_dies_between_updates_catches_up_alone_and_joins_again(stage, transport):
    check_death_between(stage, transport)


@pytest.mark.hostile
@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.long), "gloo"])
def test_one_that_dies_within_an_update_changes_nothing_for_others_and_joins_again(stage, transport):
    check_death_within(stage, transport)


def test_the_block_on_checks_runs(stage):
    with over(stage, "auto"):
        model = stage.model.model(stage.sync())
        given = {"greedy_references": greedy_references, "digest_weights": digest_weights, "model": model}
        given |= {"prompts": PROMPTS, "generators": stage.generators}
        exec(block_with("greedy_references"), given)
    assert [report.first_other for report in given["reports"]] == [None, None]


@pytest.mark.gpu
def test_versions_come_from_device_to_device(local_ray):
    with routed_stage("transformers", use_gpus=True) as stage:
        check_updates(stage, "cuda_ipc", device="cuda")


class TestOverGloo(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls):
        with (
            RouteStore() as store,
            local_stage(TransformersWorker, stores=(store, RouteStore)) as made,
            over(made, "gloo"),
        ):
            yield made


class Made(SharedMemoryTransport):
    """Those that are open."""

    open: "set[Made]" = set()  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.open.add(self)

    def close(self):
        super().close()
        self.open.discard(self)


def test_a_worker_makes_its_store_itself_and_closes_it_when_it_sleeps():
    with (
        SharedMemoryTransport() as store,
        local_stage(EchoWorker, ECHO, EchoTrainer, stores=(store, Made)) as stage,
    ):
        for _ in range(2):
            assert len(Made.open) == 1
            (row, *_) = rows_of(stage.generate(batch_of(), {"max_tokens": 2}))
            assert set(row[3]) == {float(stage.version)}, "which is the weight"
            stage.sync()
            stage.call("sleep")
            assert not Made.open
            stage.call("wake")
    assert not Made.open


@pytest.mark.parametrize(
    ("stores", "error", "says"),
    [(RouteStore, AsleepError, "wake"), (SharedMemoryTransport, GenerationError, "store=RouteStore")],
)
def test_nothing_is_published_for_who_can_not_take_part(stores, error, says):
    with (
        stores() as store,
        RouteStore() as other,
        local_stage(EchoWorker, ECHO, EchoTrainer, stores=(store, stores)) as stage,
    ):
        stage.model.store = other
        if error is AsleepError:
            stage.call("sleep")
        with pytest.raises(error, match=says), over(stage, "gloo"):
            stage.sync()
        assert stage.model.version == 1


@pytest.mark.parametrize("kind", [RouteStore, SharedMemoryTransport])
def test_a_store_of_this_process_is_refused_before_a_worker_starts(kind):
    with kind() as store, pytest.raises(ValueError, match=f"store={kind.__name__}"):
        options = {"worker_options": {"store": store}}
        start_generators(FakeCluster([2]), "transformers", EngineOptions(MODEL), **options)
