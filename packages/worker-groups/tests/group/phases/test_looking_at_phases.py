import threading

from patience import eventually

from raycrew.worker_groups import HighWater, ResourceUsage
from raycrew.worker_groups._group.phases.looking import Looking


def of(size):
    return {"train": {0: ResourceUsage(private_bytes=size)}}


def test_what_rises_within_a_phase_is_seen_by_the_thread_which_ends_with_the_phases():
    size = [1]
    looking = Looking(lambda: of(size[0]), 0.001)
    looking.begin("train")
    size[0] = 9
    eventually(lambda: looking.phases()["train"].together == HighWater(9), "it rises")
    size[0] = 2
    looking.begin("generate")
    looking.end()
    found = looking.phases()
    assert (found["train"].together, found["generate"].together) == (HighWater(9), HighWater(2))
    assert looking._thread is None
    assert looking.phases()["train"].seconds == found["train"].seconds, "it is over"
    looking.begin("train")
    assert looking.phases()["train"].times == 2
    looking.end()


def test_a_look_that_goes_on_into_the_next_phase_belongs_to_neither():
    look = dict
    looking = Looking(lambda: look(), 60.0)
    looking.begin("train")
    began, may_end = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert may_end.wait(60)
        return of(100)

    look = slow
    thread = threading.Thread(target=looking._see)
    thread.start()
    assert began.wait(60)
    look = dict
    looking.begin("generate")
    may_end.set()
    thread.join(60)
    looking.end()
    assert [use.together for use in looking.phases().values()] == [HighWater(), HighWater()]


def test_a_look_that_fails_is_no_mark_and_stops_nothing():
    def look():
        raise OSError("no node answers")

    looking = Looking(look, 0.001)
    looking.begin("train")
    looking.end()
    assert looking.phases()["train"].together == HighWater()


def test_without_looks_there_is_no_thread():
    looking = Looking(lambda: of(1), None)
    looking.begin("train")
    assert looking._thread is None
    looking.end()
    assert looking.phases()["train"].ranks == {}
