"""What becomes of claims while the ledger moves to the actor that shares it, and where that hears nothing."""

import asyncio
import threading
from contextlib import ExitStack

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from watching import drain, wait_until

from raycrew.cluster_core import BundlesOccupiedError, ClusterClosedError, RayVirtualCluster, _ray
from raycrew.cluster_core._placement.shared_ledger import SharedLedger
from raycrew.cluster_core._ray import status as _ray_status
from raycrew.cluster_core._ray.session import Session
from raycrew.cluster_core.testing import connected, simulated_nodes


@pytest.fixture
def meanwhile(monkeypatch):
    """What is put in here is done by other threads while a ledger moves, as far as they get."""
    start, doing = _ray.start_actor, []

    def start_and_do(*arguments):
        actor = start(*arguments)
        for thread in doing:
            thread.start()
            thread.join(1)
        return actor

    monkeypatch.setattr(_ray, "start_actor", start_and_do)
    yield lambda do: doing.append(threading.Thread(target=do))
    for thread in doing:
        thread.join(60)


def test_a_claim_that_is_released_while_the_ledger_moves_is_given_back(local_ray, meanwhile):
    with RayVirtualCluster([3], use_gpus=False) as cluster:
        one, other, kept = (cluster.claim([i], f"holder {i}") for i in range(3))
        meanwhile(one.release)
        meanwhile(lambda: cluster.release_holder("holder 1"))
        ray.put(cluster)
        wait_until(lambda: cluster.holders() == {2: ("holder 2",)})
        cluster.claim([0, 1], "next").release()
        kept.release()
        other.release()


def test_a_cluster_that_is_shut_down_while_it_is_handed_on_leaves_no_ledger(local_ray, meanwhile):
    cluster = RayVirtualCluster([1], use_gpus=False)
    meanwhile(cluster.shutdown)
    with pytest.raises(ClusterClosedError, match="was shut down while it was handed on"):
        ray.put(cluster)
    wait_until(lambda: not [one for one in _ray_status.actor_states() if one.class_name == "LedgerKeeper"])


def test_a_claim_that_was_given_up_before_the_answer_is_given_back(local_ray, monkeypatch):
    take, given_up = SharedLedger.take, threading.Event()
    given_up.set()

    def take_in_vain(*arguments):
        with Session.until_set(given_up):
            return take(*arguments)

    with RayVirtualCluster([1], use_gpus=False) as cluster:
        ray.put(cluster)
        cluster.claim([0], "first").release()
        with monkeypatch.context() as patch:
            patch.setattr(SharedLedger, "take", take_in_vain)
            raised = []

            def claim():
                with pytest.raises(asyncio.CancelledError) as caught:
                    cluster.claim([0], "who gave up")
                raised.append(caught)

            thread = threading.Thread(target=claim)
            thread.start()
            thread.join(60)
        assert raised
        assert cluster.holders() == {}
        cluster.claim([0], "next").release()


@ray.remote(num_cpus=0)
def no_answer(*_):
    raise ActorUnavailableError("the connection broke", None)


class Losing:
    """An actor whose every other answer is lost."""

    def __init__(self, actor):
        self.actor, self.count, self.asked = actor, 0, []

    @property
    def call(self):
        return self

    def remote(self, *arguments):
        answer = self.actor.call.remote(*arguments)
        self.count += 1
        self.asked.append(arguments[0])
        return no_answer.remote(answer) if self.count % 2 else answer


def test_a_lost_answer_leaves_no_claim_and_gives_none_up(local_ray, monkeypatch):
    start, keepers = _ray.start_actor, []

    def start_losing(*arguments):
        keepers.append(Losing(start(*arguments)))
        return keepers[-1]

    with RayVirtualCluster([2], use_gpus=False) as cluster, monkeypatch.context() as patch:
        patch.setattr(_ray, "start_actor", start_losing)
        patch.setattr(_ray, "end_actor", lambda losing: ray.kill(losing.actor))
        ray.put(cluster)
        claim = cluster.claim([0], "mine")
        assert cluster.holders() == {0: ("mine",)}
        for refused, match in (([0], "held by bundle 0: mine"), ([7], "7")):
            with pytest.raises((BundlesOccupiedError, ValueError), match=match):
                cluster.claim(refused, "other")
        assert "release" not in keepers[0].asked  # as nothing was taken
        claim.release()
        assert cluster.holders() == {}
        claims = [cluster.claim([i], "mine") for i in range(2)]
        assert cluster.release_holder("mine") == 2
        for claim in claims:
            claim.release()
        cluster.shutdown()


def test_a_claim_that_cannot_be_given_back_hides_no_error(local_ray, caplog):
    class Broken(Losing):
        def remote(self, *arguments):
            if arguments[0] == "release":
                raise OSError("no way there")
            raise KeyboardInterrupt

    ledger = SharedLedger(Broken(None), 1)
    with pytest.raises(KeyboardInterrupt):
        ledger.take([0], "mine")
    assert "a claim of 'mine' may be held" in caplog.text and "no way there" in caplog.text


def test_a_ledger_lies_on_its_owners_node_so_that_the_end_of_no_other_one_ends_it(ray_nodes):
    here = ray.get_runtime_context().get_node_id()
    with ExitStack() as stack:
        clusters = [stack.enter_context(RayVirtualCluster([1], use_gpus=False)) for _ in range(6)]
        ray.put(clusters)
        for cluster in clusters:
            cluster.holders()
        keepers = [one for one in _ray_status.actor_states() if one.class_name == "LedgerKeeper"]
        assert [one.node_id for one in keepers] == [here] * len(clusters)


@ray.remote(num_cpus=1)
class Busy:
    def ping(self):
        pass


def test_a_cluster_is_shared_from_a_node_that_is_being_drained():
    ray.shutdown()
    with simulated_nodes([{"num_cpus": 2}] * 2) as nodes, connected(nodes.address):
        here = ray.get_runtime_context().get_node_id()
        busy = Busy.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote()
        ray.get(busy.ping.remote(), timeout=120)  # an idle node leaves at once
        drain(here)
        with RayVirtualCluster([1], use_gpus=False) as cluster:
            ray.put(cluster)
            assert cluster.holders() == {}
        ray.kill(busy)
