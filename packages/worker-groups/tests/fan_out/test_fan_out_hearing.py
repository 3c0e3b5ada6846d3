"""Whether hosts answer, without Ray."""

import pytest

from raycrew.worker_groups._fan_out.hearing import LOOK_S, SILENT_S, Hearing

LOOKS = round(SILENT_S / LOOK_S)


class World:
    def __init__(self):
        self.now, self.asked, self.answered = 0.0, [], set()
        self.hearing = Hearing(self.ask, self.answered.__contains__, lambda: self.now)

    def ask(self, host):
        self.asked.append(host)
        return len(self.asked) - 1

    def look(self, busy, times=1, answers=()):
        found = []
        for _ in range(times):
            self.answered |= {n for n, host in enumerate(self.asked) if host in answers}
            self.now += LOOK_S
            found += self.hearing.fallen_silent(busy)
        return found


@pytest.fixture
def world():
    return World()


def test_who_never_answers_is_told_of_once_and_is_asked_once(world):
    assert world.look(["a", "b"], LOOKS, answers=["b"]) == []
    assert world.look(["a", "b"], 1, answers=["b"]) == ["a"]
    assert world.look(["a", "b"], 3 * LOOKS, answers=["b"]) == []
    assert world.asked.count("a") == 1


def test_who_answers_late_begins_anew(world):
    assert world.look(["a"], LOOKS) == []
    assert world.look(["a"], LOOKS, answers=["a"]) == []
    assert world.look(["a"], LOOKS - 1) == []
    assert world.look(["a"]) == ["a"]


def test_a_pause_of_this_process_is_one_look(world):
    world.look(["a"])
    world.now += 100 * SILENT_S
    assert world.look(["a"]) == []
    assert world.look(["a"], LOOKS - 1) == ["a"]


def test_nothing_is_asked_before_a_look_is_due_nor_of_who_runs_nothing(world):
    assert (world.hearing.fallen_silent(["a"]), world.asked, world.hearing.pause_s) == ([], [], LOOK_S)
    world.look(["a"], LOOKS)
    world.look([])
    assert world.look(["a"], LOOKS) == []
    assert world.asked == ["a", "a"]
