"""Phases of groups in this process; test_phases_on_ray has what needs processes that die."""

import asyncio
import contextlib
import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_workers import DEVICES, Device, OnDevice

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    PhaseError,
    PhaseManager,
    PhaseTimeoutError,
    UnknownMethodError,
    WorkerFailureError,
    timeline,
)
from raycrew.worker_groups.testing import InProcessGroup

pytestmark = pytest.mark.hostile

keys = itertools.count()
NAMES = ("train", "generate")


class Colocated:
    """Groups of two ranks on the same bundles, in phases."""

    def __init__(self, *names, **options):
        self.key = next(keys)
        self.device = DEVICES[self.key] = Device()
        self.phases = PhaseManager(*names, **options)
        self.cluster = FakeCluster([1], max_colocated_worker_groups=len(names))
        self.groups = {}

    def start(self, name, **methods):
        group = InProcessGroup(self.cluster, OnDevice, key=self.key, name=name, name_prefix=name)
        self.groups[name] = group
        self.phases.add(name, group, **methods)

    def end(self):
        for group in self.groups.values():
            group.shutdown(force=True)
        del DEVICES[self.key]

    @property
    def steps(self):
        """Steps since this was asked for last."""
        with self.device.lock:
            taken, self.device.steps[:] = self.device.steps[:], []
        return taken


@contextlib.contextmanager
def colocated(*names, **options):
    made = Colocated(*(names or NAMES), **{"look_s": None, **options})
    try:
        for name in made.phases.report().states:
            with made.phases.turn(name):
                made.start(name)
        made.steps  # noqa: B018 - those of the start
        yield made
    finally:
        made.end()
    assert made.device.crowds == [], "two were awake at the same time"


def test_a_group_starts_in_its_turn_when_all_others_sleep():
    made = Colocated("train", "generate", look_s=None)
    phases = made.phases
    with phases.turn("train"):
        assert phases.may_wake("train")
        assert phases.awake is None
        made.start("train")
        assert phases.awake == "train"
    with phases.turn("generate"):
        assert made.steps == [("train", "wake"), ("train", "sleep")]
        assert (phases.may_wake("train"), phases.may_wake("generate")) == (False, True)
        made.start("generate")
    assert repr(phases) == "PhaseManager(train asleep, generate awake)"
    made.end()


def test_turns_put_to_sleep_before_they_wake_and_no_more_than_needed():
    with colocated("train", "generate", "score") as made:
        with made.phases.turn("train"):
            assert made.steps == [("score", "sleep"), ("train", "wake")]
        with made.phases.turn("train"):
            assert made.steps == [], "it stayed awake"
        with made.phases.turn("generate"):
            assert made.steps == [("train", "sleep"), ("generate", "wake")]
            with made.phases.turn("generate"):
                assert made.steps == []
            assert made.phases.awake == "generate"


def test_a_member_without_a_group_has_turns_too():
    with colocated() as made:
        made.groups.pop("generate").shutdown()
        made.device.on_it.discard("generate")
        made.phases.remove("generate")
        made.phases.remove("generate")
        with made.phases.turn("train"):
            assert made.steps == [("train", "wake")], "who is gone is not put to sleep"
        with made.phases.turn("generate"):
            assert made.phases.awake is None
            assert made.steps == [("train", "sleep")]


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_sleep_that_raises_wakes_nobody_and_is_tried_again(fails):
    with colocated() as made:
        made.device.failures["generate", "sleep"] = fails
        ran = []
        failed = pytest.raises(PhaseError, match=r"sleep\(\) of 'generate' failed, and nobody")
        with failed as caught, made.phases.turn("train"):
            ran.append("the body")
        assert ran == []
        assert caught.value.member == "generate"
        assert isinstance(caught.value.__cause__, WorkerFailureError)
        assert made.phases.awake is None
        assert not any(map(made.phases.may_wake, NAMES)), "what is replaced now has to come up asleep"
        assert ("train", "wake") not in made.steps
        with made.phases.turn("train"):
            assert made.steps == [("generate", "sleep"), ("train", "wake")]


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_wake_that_raises_leaves_a_member_that_is_put_to_sleep_before_others_wake(fails):
    with colocated() as made:
        made.device.failures["train", "wake"] = fails
        with pytest.raises(PhaseError, match=r"wake\(\) of 'train' failed"), made.phases.turn("train"):
            pass
        assert made.phases.report().states["train"] == "unsure"
        made.steps  # noqa: B018
        with made.phases.turn("generate"):
            assert made.steps == [("train", "sleep"), ("generate", "wake")]


def test_what_the_block_raises_ends_the_turn():
    with colocated() as made:
        with pytest.raises(ZeroDivisionError), made.phases.turn("train"):
            raise ZeroDivisionError
        with made.phases.turn("generate", timeout_s=30):
            assert made.steps[-1] == ("generate", "wake")


def test_workers_that_are_of_a_new_generation_are_asked_again():
    with colocated() as made:
        made.groups["train"].renew_rendezvous()
        with made.phases.turn("generate"):
            assert made.steps == [("train", "sleep")]
            made.groups["generate"].renew_rendezvous()
            with made.phases.turn("generate"):
                assert made.steps == [("generate", "wake")]
            with made.phases.turn("generate"):
                assert made.steps == []


def test_threads_have_turns_one_after_the_other():
    with colocated() as made:
        inside, seen, lock = [], [], threading.Lock()

        def run(name):
            for _ in range(10):
                with made.phases.turn(name, timeout_s=60):
                    inside.append(name)
                    with lock:
                        seen.append((list(inside), set(made.device.on_it)))
                    inside.remove(name)

        threads = [threading.Thread(target=run, args=(name,)) for name in NAMES * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(seen) == 40
        assert all(there == [next(iter(on_it))] and len(on_it) == 1 for there, on_it in seen)


def test_a_turn_that_is_late_is_given_up():
    with colocated() as made:
        made.groups["train"].shutdown()
        made.phases.remove("train")
        with made.phases.turn("train"):
            made.start("train", wake="wake_late")
        with made.phases.turn("generate"):
            failed = []

            def ask():
                try:
                    with made.phases.turn("train", timeout_s=0.05):
                        pass
                except PhaseTimeoutError as error:
                    failed.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(60)
            assert len(failed) == 1
            made.steps  # noqa: B018
        with (
            pytest.raises(PhaseTimeoutError, match=r"wake_late\(\) of 'train' failed"),
            made.phases.turn("train", timeout_s=2.0),  # by then `sleep` of the other one is over
        ):
            pass
        assert made.steps == [("generate", "sleep")]
        assert made.phases.report().states == {"train": "unsure", "generate": "asleep"}


def test_what_can_not_be_meant_is_said_at_once():
    for names in ((), ("train", "train"), ("",)):
        with pytest.raises(ValueError, match="names of their own"):
            PhaseManager(*names)
    for wrong in ({"timeout_s": 0}, {"look_s": -1.0}):
        with pytest.raises(ValueError, match="above 0, or None"):
            PhaseManager("train", **wrong)
    with colocated() as made:
        phases, group = made.phases, made.groups["train"]
        for ask in (phases.turn, phases.may_wake, phases.remove, lambda name: phases.add(name, group)):
            with pytest.raises(ValueError, match=r"no member 'trian'; there are \['train', 'generate'\]"):
                ask("trian")
        with pytest.raises(PhaseError, match="within its turn"):
            phases.add("train", group)
        with phases.turn("train"):
            with pytest.raises(PhaseError, match=r"'train' has a group; remove\(\) it first"):
                phases.add("train", group)
            with pytest.raises(PhaseError, match="within a turn of 'train' there is none of 'generate'"):
                phases.turn("generate").__enter__()
            phases.remove("train")
            with pytest.raises(UnknownMethodError, match="doze"):
                phases.add("train", group, sleep="doze")
            with pytest.raises(TypeError, match="something"):
                phases.add("train", group, wake="needs")
            assert phases.report().states["train"] == "absent"
            phases.add("train", group)


def test_tasks_have_turns_too():
    async def main(made):
        order = []

        async def run(name):
            async with made.phases.turn(name, timeout_s=60):
                order.append((name, set(made.device.on_it)))
                await asyncio.sleep(0.01)
                async with made.phases.turn(name):
                    order.append((name, set(made.device.on_it)))
                with made.phases.turn(name):
                    pass
                if len(order) == 2:
                    await refused(made)

        async def refused(made):
            async def blocking():
                with made.phases.turn("train"):
                    pass

            with pytest.raises(PhaseError, match="async with"):
                await asyncio.create_task(blocking())

        await asyncio.gather(*map(run, NAMES * 2))
        return order

    with colocated() as made:
        order = asyncio.run(main(made))
        assert order[::2] == order[1::2], "nobody comes in between"
        assert sorted(name for name, _ in order[::2]) == sorted(NAMES * 2)
        assert all(on_it == {name} for name, on_it in order)


def test_a_task_does_not_block_its_loop_when_it_removes_a_group():
    async def main(made):
        async with made.phases.turn("train"):
            removes = asyncio.create_task(remove(made))
            with pytest.raises(PhaseError, match="async with"):
                await asyncio.wait_for(removes, 30)
        async with made.phases.turn("generate"):
            made.phases.remove("generate")

    async def remove(made):
        made.phases.remove("generate")

    with colocated(timeout_s=60.0) as made:
        asyncio.run(main(made))
        assert made.phases.report().states["generate"] == "absent"


def test_a_group_that_is_shut_down_within_its_turn_is_to_be_removed():
    with colocated() as made:
        with made.phases.turn("train"):
            made.groups["train"].shutdown()
            made.device.on_it.discard("train")
        with pytest.raises(PhaseError, match=r"remove\('train'\)"), made.phases.turn("generate"):
            pass
        made.phases.remove("train")
        with made.phases.turn("generate"):
            assert made.phases.awake == "generate"
        with made.phases.turn("train"):
            made.start("train")
            assert made.phases.awake == "train"


def test_a_task_that_is_cancelled_gives_its_turn_up():
    async def main(made):
        async with made.phases.turn("generate"):
            waits = asyncio.create_task(take(made))
            while not made.phases._entrance._waiting:
                await asyncio.sleep(0.001)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
        made.device.failures["train", "wake"] = "after"
        made.steps  # noqa: B018
        async with made.phases.turn("generate", timeout_s=30):
            assert made.steps == []

    async def take(made):
        async with made.phases.turn("train"):
            raise AssertionError("it was cancelled")

    with colocated() as made:
        asyncio.run(main(made))


def test_a_block_may_be_left_by_another_thread_than_entered_it():
    with colocated() as made:
        turn = made.phases.turn("train")
        turn.__enter__()
        thread = threading.Thread(target=turn.__exit__, args=(None, None, None))
        thread.start()
        thread.join(60)
        with made.phases.turn("generate", timeout_s=30):
            pass


def test_a_timeline_has_turns_and_steps():
    with colocated() as made, timeline() as run:
        with made.phases.turn("train"):
            time.sleep(0.002)
        made.device.failures["generate", "wake"] = "before"
        with pytest.raises(PhaseError), made.phases.turn("generate"):
            pass
        drawn = run.trace()["traceEvents"]
    kinds = [one["name"] for one in drawn if one.get("cat") in ("turn", "sleep", "wake")]
    assert sorted(kinds) == ["sleep", "sleep", "turn", "turn", "wake", "wake"]


def test_it_explains_members_and_phases():
    with colocated(look_s=60.0) as made:
        with made.phases.turn("train"):
            pass
        report = made.phases.report()
        assert {phase: use.times for phase, use in report.phases.items()} == {
            "to train": 2,
            "train": 2,
            "to generate": 1,
            "generate": 1,
        }
        assert list(report.phases["train"].ranks) == ["train", "generate"]
        text = made.phases.explain()
    assert text.startswith(
        "train: train, sleep() and wake()\ngenerate: generate, sleep() and wake()\ntrain is awake"
    )
    assert "; memory not seen" in text, "workers in this process have no memory of their own"
    assert not [thread for thread in threading.enumerate() if thread.name == "phases"]


FAILURES = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["sleep", "wake"])),
    st.sampled_from(["before", "after"]),
)
TURNS = st.lists(st.tuples(st.sampled_from(NAMES), FAILURES, st.sets(st.sampled_from(NAMES))), max_size=8)


@settings(max_examples=40, deadline=None)
@given(TURNS)
def test_whatever_fails_no_two_are_awake_and_turns_come_again(turns):
    with colocated() as made:
        for name, failures, renewed in turns:
            made.device.failures = dict(failures)
            for other in renewed:
                made.groups[other].renew_rendezvous()
            with contextlib.suppress(PhaseError), made.phases.turn(name):
                assert made.device.on_it == {name}
        made.device.failures = {}
        for name in NAMES:
            with made.phases.turn(name):
                assert made.device.on_it == {name}
