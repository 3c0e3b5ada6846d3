"""Phases of groups whose workers have memory, and die."""

import os
import signal

import pytest
from patience import eventually, is_running
from phase_workers import Hoarder

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import PhaseError, PhaseManager, RayWorkerGroup

pytestmark = pytest.mark.hostile

SIZE = 48 << 20
LITTLE = 24 << 20


@pytest.fixture
def cluster(local_ray):
    with RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture
def start(cluster, tmp_path):
    """Starts a member, whose workers ask on their start whether they may take memory."""
    started = []

    def begin(phases, name, **options):
        (folder := tmp_path / name).mkdir()
        with phases.turn(name):
            group = RayWorkerGroup(
                cluster,
                Hoarder,
                name_prefix=name,
                init=lambda _: {
                    "size_bytes": SIZE,
                    "folder": str(folder),
                    "asleep": not phases.may_wake(name),
                },
                **options,
            )
            started.append(group)
            phases.add(name, group)
        return group

    yield begin
    for group in started:
        group.shutdown(force=True)


def kill(group):
    (pid,) = group.call("pid").get_results(timeout=60)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_running(pid), "it dies")
    eventually(lambda: group.get_worker_status()[0] == "dead", "it is seen to be dead")


def state(group):
    """Bytes that it has, and whether it came up asleep."""
    return group.call("state").get_results(timeout=60)[0]


def is_marked(phases, name):
    """Whether it is known of a turn how much its group had, and how much the other one."""
    use = phases.report().phases.get(name)
    return use is not None and len(use.ranks) == 2 and use.ranks[name][0].host_bytes > SIZE


def test_marks_show_who_had_memory_and_workers_that_die_come_up_as_their_phase_is(start):
    phases = PhaseManager("train", "generate", look_s=0.05)
    trainer = start(phases, "train")
    generator = start(
        phases,
        "generate",
        restart_on_failure=True,
        idempotent_methods=("sleep", "wake", "pid"),
        max_restarts=9,
    )
    for _ in range(2):
        with phases.turn("train"):
            assert (state(trainer)[0], state(generator)[0]) == (SIZE, 0)
            eventually(lambda: is_marked(phases, "train"), "a look sees who is awake")
        with phases.turn("generate"):
            eventually(lambda: is_marked(phases, "generate"), "a look sees who is awake")
            assert (state(trainer)[0], state(generator)[0]) == (0, SIZE)

    marks = phases.report().phases
    own, other = (marks["train"].ranks[name][0].host_bytes for name in ("train", "generate"))
    assert own > SIZE
    assert own - other > SIZE - LITTLE
    for use in marks.values():
        little = sum(min(found.host_bytes for found in ranks.values()) for ranks in use.ranks.values())
        assert use.together.host_bytes < little + SIZE + LITTLE, "both had theirs at the same time"
    assert "  train: rank 0 " in phases.explain()

    with phases.turn("train"):  # dies while it sleeps, and is replaced while it has no turn
        kill(generator)
        assert generator.restart_failed_workers() == [0]
        assert state(generator) == (0, True)
    with phases.turn("generate"):
        assert state(generator) == (SIZE, True)
        kill(generator)  # within its turn
        generator.call("pid").get_results(timeout=60)
        assert state(generator) == (SIZE, False)
    generator.call("die_in", "sleep").get_results()
    with phases.turn("train"):  # it dies of being put to sleep, and one that sleeps replaces it
        assert (state(trainer)[0], state(generator)) == (SIZE, (0, True))


def test_a_worker_that_dies_asleep_is_no_ones_turn_until_it_is_replaced(start):
    phases = PhaseManager("train", "generate", look_s=None)
    trainer, generator = start(phases, "train"), start(phases, "generate")
    kill(trainer)
    with pytest.raises(PhaseError, match=r"wake\(\) of 'train' failed"), phases.turn("train"):
        pass
    assert state(generator)[0] == 0
    assert trainer.restart_failed_workers() == [0]
    with phases.turn("train"):
        assert state(trainer)[0] == SIZE
    kill(trainer)
    with pytest.raises(PhaseError, match=r"sleep\(\) of 'train' failed"), phases.turn("generate"):
        pass
    assert state(generator)[0] == 0, "whether the trainer still has memory is not known"
    assert trainer.restart_failed_workers() == [0]
    assert state(trainer) == (0, True)
    with phases.turn("generate"):
        assert state(generator)[0] == SIZE
