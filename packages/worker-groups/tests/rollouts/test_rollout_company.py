"""Rollouts that take their process along, in a made-up pool: who was beside them has no part in it."""

import itertools
import random
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from ray.exceptions import ActorDiedError

from raycrew.worker_groups.balancing import Sent, WorkerLoad
from raycrew.worker_groups.errors import WorkerFailureError
from raycrew.worker_groups.rollouts import RolloutCollection
from raycrew.worker_groups.rollouts._delivery import Delivery, Progress
from raycrew.worker_groups.rollouts._engine import calls as calling
from raycrew.worker_groups.rollouts._engine.calls import Limits, RolloutCalls
from raycrew.worker_groups.rollouts._engine.company import Company
from raycrew.worker_groups.rollouts._engine.engine import Bounds, Engine
from raycrew.worker_groups.rollouts._engine.prompts import Prompts
from raycrew.worker_groups.rollouts._engine.tasks import Retries
from raycrew.worker_groups.rollouts._telling import Tally
from raycrew.worker_groups.rollouts._values import Outcome, Wishes


class Pool:
    """Workers that die of some prompts, and are new at once."""

    def __init__(self, n_workers, deadly, seed):
        self.generations, self.outstanding = [1] * n_workers, [0] * n_workers
        self.deadly, self.dead, self.dice = deadly, set(), random.Random(seed)
        self.lock, self.company, self.crowd = threading.Lock(), Company(), []
        self.balancer = self

    def loads(self):
        return [WorkerLoad(rank, n) for rank, n in enumerate(self.outstanding)]

    def send(self, rank, method, args, kwargs, timeout):
        with self.lock:
            self.outstanding[rank] += 1
            process, prompt = (rank, self.generations[rank]), cloudpickle.loads(args[0].prompt)
        future = SimpleNamespace(get_results=lambda: self.result(process, prompt), cancel=lambda: None)
        return Sent(*process, future, None)

    def result(self, process, prompt):
        with self.lock:
            if process not in self.dead and prompt in self.deadly:
                self.dead.add(process)
                self.generations[process[0]] += 1
        if process in self.dead:
            raise WorkerFailureError("it has died", rank=process[0], cause=ActorDiedError())
        return [Outcome(cloudpickle.dumps(prompt))]

    def returned(self, sent):
        with self.lock:
            self.outstanding[sent.rank] -= 1

    def lose(self, sent):
        pass

    def collect(self, prompts, per_worker, retries):
        wake, tally = threading.Event(), Tally("p")
        retried = Retries(retries, False)
        calls = RolloutCalls(self, Limits(None, 0.1), Wishes(), retried, wake, tally, {}, self.company)
        stream, bounds = Prompts(prompts, None, wake.set), Bounds(2, per_worker, 4 * per_worker)
        progress = Progress(None, {})
        engine = Engine(calls, stream, progress, None, bounds, "return", wake, tally)
        return RolloutCollection(engine, progress, Delivery(progress.run, None, None, lambda: False))


@pytest.fixture(autouse=True, scope="module")
def any_order():
    patch = pytest.MonkeyPatch()
    dice = random.Random(0)
    patch.setattr(calling, "ended_of", lambda sent, *_, **__: [dice.choice(sent)])
    patch.setattr(calling, "_LOOK_S", 0.01)
    yield
    patch.undo()


def check(groups, n, deadly, retries):
    assert sorted(group.prompt for group in groups) == list(range(n))
    for group in groups:
        if group.prompt in deadly:
            assert {(each.kind, each.attempts) for each in group.failures.values()} == {("lost", retries + 1)}
            assert len(group.failures) == 2
        else:
            assert list(group.samples) == [group.prompt] * 2


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sets(st.integers(0, 11), max_size=3),
    st.integers(),
)
def test_only_who_takes_a_process_along_has_failed(n_workers, per_worker, retries, deadly, seed):
    pool = Pool(n_workers, deadly, seed)
    groups = list(pool.collect(range(12), per_worker, retries))
    check(groups, 12, deadly, retries)
    assert pool.outstanding == [0] * n_workers and not pool.company.kept(None)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_collections_of_one_pool_wait_for_each_others_turns_alone(n_workers):
    pool, told = Pool(n_workers, {3, 4}, 0), {}
    threads = [
        threading.Thread(target=lambda i=i: told.update({i: list(pool.collect(range(20), 3, 1))}))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(told) == [0, 1, 2]
    for groups in told.values():
        check(groups, 20, {3, 4}, 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_collection_that_is_closed_at_any_moment_keeps_no_worker(seed):
    dice = random.Random(seed)
    pool = Pool(dice.randint(1, 3), {0, 3, 7}, seed)
    collection = pool.collect(itertools.count(), dice.randint(1, 4), dice.randint(0, 2))
    for _ in range(dice.randint(0, 12)):
        next(collection)
    collection.close()
    assert sum(pool.outstanding) == 0 and not pool.company.kept(None)


def test_a_collection_that_waits_for_its_turn_can_be_closed():
    pool = Pool(1, {0}, 0)
    pool.company.keep("another", pool.loads())
    collection = pool.collect(range(3), 1, 1)
    collection.close()
    assert not collection._engine._thread.is_alive()
    assert list(pool.company.kept(None)) == [0]
