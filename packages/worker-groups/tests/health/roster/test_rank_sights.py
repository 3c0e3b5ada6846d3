"""What is seen of ranks, from records, Ray's word and what watches tell."""

import json
from dataclasses import replace

import pytest
from test_group_records import RECORD, START, STARTING, WORKERS

from raycrew.worker_groups._health import RunningCall, Seen
from raycrew.worker_groups._health.roster.sights import GroupSight, Stacks, group_sight, key_of

LIVING = {(RECORD.namespace, worker.actor) for worker in WORKERS}
CALL = RunningCall("train", 7, 10.0, 2.0)


def seen(**known):
    return Seen(**{"is_alive": True, "is_told": True, "beat_age_s": 0.3, **known})


def sight(told, living=LIVING, silent=None) -> GroupSight:
    reports = {key_of(WORKERS[0]): told} if told is not None else {}
    return group_sight(RECORD, living, {**reports, key_of(WORKERS[1]): seen()}, silent or {}, 0.0)


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (seen(), "ready"),
        (seen(calls=(CALL,)), "busy"),
        (seen(calls=(CALL,), is_stopped=True), "stopped"),
        (seen(calls=(CALL,), beat_age_s=2.5), "silent"),
        (seen(beat_age_s=1.5), "ready"),
        (seen(is_told=False), "alive"),
        (Seen(is_alive=False, calls=(CALL,)), "dead"),
        ("its process id is of another namespace", "unanswered"),
        (None, "unanswered"),
    ],
)
def test_states(told, state):
    found = sight(told)
    assert [rank.state for rank in found.ranks] == [state, "ready"]
    assert found.counts == ({state: 1, "ready": 1} if state != "ready" else {"ready": 2})


def test_a_process_that_nobody_tells_of_is_dead_once_its_actor_is():
    gone = LIVING - {(RECORD.namespace, WORKERS[0].actor)}
    assert sight(None, gone).ranks[0].state == "dead"
    assert sight("can't be looked at", gone).ranks[0].state == "dead"


def test_of_a_group_that_starts_ranks_are_starting_unless_more_is_known():
    told = {key_of(WORKERS[0]): seen(), key_of(WORKERS[1]): seen(calls=(replace(CALL, method="__init__"),))}
    found = group_sight(replace(RECORD, start=START), LIVING, told, {}, 112.0)
    assert [rank.state for rank in found.ranks] == ["starting", "busy"]
    assert found.counts == {"starting": 3, "busy": 1} and found.as_dict()["note"].startswith(
        "starting for 12 s"
    )
    nobody_yet = group_sight(STARTING, set(), {}, {}, 112.0)
    assert (nobody_yet.ranks, nobody_yet.counts) == ((), {"starting": 4})


def test_who_stands_by_is_told_of_beside_the_ranks():
    standby = replace(WORKERS[1], rank=-1, pid=13)
    told = {key_of(WORKERS[0]): seen(), key_of(WORKERS[1]): seen(), key_of(standby): seen(is_stopped=True)}
    found = group_sight(replace(RECORD, standbys=(standby,)), LIVING, told, {}, 0.0)
    assert (found.n_ranks, found.counts) == (2, {"ready": 2})
    assert [(one["pid"], one["state"]) for one in found.as_dict()["standbys"]] == [(13, "stopped")]


def test_of_a_group_that_restarts_the_dead_are_starting_and_the_others_what_they_are():
    again = replace(RECORD, start=replace(START, doing="restarting", n_ranks=2))
    for told, living in (({}, {(RECORD.namespace, WORKERS[1].actor)}), ({0: seen(is_alive=False)}, LIVING)):
        reports = {key_of(WORKERS[rank]): one for rank, one in {1: seen(), **told}.items()}
        found = group_sight(again, living, reports, {}, 112.0)
        assert [rank.state for rank in found.ranks] == ["starting", "ready"]
        assert found.note.startswith("restarting for 12 s")
    idle = group_sight(replace(again, workers=(), standbys=WORKERS), set(), {}, {}, 112.0)
    assert [one.state for one in idle.standbys] == ["dead", "dead"]
    smaller = replace(RECORD, start=replace(START, doing="shrinking", n_ranks=1))
    fewer = group_sight(smaller, LIVING, {}, {}, 0.0)
    assert fewer.counts == {"unanswered": 2}


def test_why_nothing_is_known_is_told():
    assert "did not answer" in sight(None, silent={"node0": "its node did not answer"}).ranks[0].note
    assert "no watch" in sight(None).ranks[0].note
    assert sight("other namespace", silent={"node0": "late"}).ranks[0].note == "other namespace"
    assert sight(seen()).ranks[0].note == ""


def test_a_later_process_of_the_number_is_another():
    other = {("node0", 11, 101): seen(), ("node1", 11, 100): seen()}
    assert group_sight(RECORD, LIVING, other, {}, 0.0).ranks[0].state == "unanswered"


def test_what_programs_get():
    late = RunningCall("later", 8, 1.0, 1.0)
    told = sight(seen(calls=(late, CALL), private_bytes=5, device_bytes=6, cpu=1.5, n_processes=2)).as_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["name"], told["generation"], told["states"]) == ("policy", 2, {"ready": 1, "busy": 1})
    first, second = told["workers"]
    assert (first["method"], first["running_s"], first["silent_s"]) == ("train", 10.0, 2.0)
    assert (first["private_bytes"], first["device_bytes"], first["cpu"]) == (5, 6, 1.5)
    assert (first["placement_group"], first["tied_group"], first["device"]) == ("pg", 0, "cuda:3")
    assert second["method"] is None and second["private_bytes"] is None


def test_programs_get_what_is_known_of_somebody_whom_nobody_has_seen():
    first, second = sight(None).as_dict()["workers"]
    assert first.keys() == second.keys()
    assert (first["pid"], first["state"], first["method"], first["cpu"]) == (11, "unanswered", None, None)


def test_programs_get_stacks_with_whose_they_are():
    told = Stacks(RECORD, WORKERS[1], "a stack", "py-spy").as_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["group"], told["namespace"], told["rank"], told["pid"]) == ("policy", "spaces", 1, 12)
    assert (told["text"], told["told_by"], told["note"]) == ("a stack", "py-spy", "")
