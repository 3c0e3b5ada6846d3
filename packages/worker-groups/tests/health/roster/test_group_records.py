"""What a group leaves of itself to read."""

import json
from dataclasses import replace

import pytest

from raycrew.worker_groups._health.roster.records import GroupRecord, StartRecord, WorkerRecord, record_of

WORKERS = (
    WorkerRecord(0, "policy-0-0-ab", "node0", "10.0.0.1", 11, 100, 0, "cuda:3", 0, "pg", 0),
    WorkerRecord(1, "policy-0-1-ab", "node1", "10.0.0.2", 12, 200, 1),
)
RECORD = GroupRecord("policy", "app.Policy", "spaces", "me", 2, WORKERS)
WATCH = "watch-me-"
START = StartRecord("import and __init__", 100.0, 400.0, 4, 3, "rank 2", "0100")
STARTING = replace(RECORD, workers=(), generation=0, start=START)


def test_what_is_left_is_read_again():
    text = RECORD.as_text()
    assert record_of(text) == RECORD
    assert record_of(STARTING.as_text()) == STARTING
    beside = replace(RECORD, standbys=(replace(WORKERS[1], rank=-1, pid=13),))
    assert record_of(beside.as_text()) == beside
    assert [worker.pid for worker in beside.processes] == [11, 12, 13]
    entry = json.loads(text)
    assert entry["workers"][1]["pid"] == 12
    assert entry["version"] == 1, "what released versions read"
    del entry["standbys"]  # as an earlier version has left it
    entry["later"] = entry["workers"][0]["later"] = "what a later version adds"
    assert record_of(json.dumps(entry)) == RECORD


@pytest.mark.hostile
@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "null",
        "{}",
        '{"version": 1}',
        '{"version": 2, "name": "policy", "workers": []}',
        '{"version": 1, "workers": [{"rank": 0}]}',
        '{"version": 1, "workers": 7}',
        "[" * 100_000,
        RECORD.as_text().replace('"version": 1', '"version": 0'),
        RECORD.as_text().replace('"version": 1', '"version": 2'),
        RECORD.as_text().replace('"policy"', "null"),
        RECORD.as_text().replace('"policy"', '["policy"]'),
        RECORD.as_text().replace('"rank": 1', '"rank": "1"'),
        RECORD.as_text().replace('"node_id": "node0"', '"node_id": 0'),
        RECORD.as_text().replace('"generation": 2', '"generation": 2.5'),
        RECORD.as_text().replace('"device": "cpu"', '"device": null'),
        RECORD.as_text()[:-1],
        STARTING.as_text().replace('"job": "0100"', '"job": 100'),
        STARTING.as_text().replace('"until": 400.0', '"until": "soon"'),
        RECORD.as_text().replace('"start": null', '"start": 7'),
        RECORD.as_text().replace('"standbys": []', '"standbys": 7'),
    ],
)
def test_what_is_no_record_is_none(text):
    assert record_of(text) is None


def test_how_far_a_start_has_got_is_said_in_words():
    assert START.note(112.4) == ("starting for 12 s: import and __init__, 3 of 4 ranks are done, not rank 2")
    assert replace(START, step="environment", n_answered=4, missing="").note(0.0) == (
        "starting for 0 s: environment"
    )
    assert replace(START, n_answered=0, missing="").note(101.0).endswith("import and __init__")


@pytest.mark.parametrize(
    ("now", "jobs", "is_over"),
    [(399.0, {"0100"}, False), (399.0, None, False), (401.0, {"0100"}, True), (101.0, {"0200"}, True)],
)
def test_a_start_is_over_with_its_driver_and_its_time(now, jobs, is_over):
    assert START.is_over(now, jobs) is is_over
    assert not START.is_over(START.until, jobs and {START.job}), "at the last moment"


@pytest.mark.parametrize(
    ("living", "is_left_over"),
    [
        ({("spaces", "policy-0-1-ab")}, False),
        ({("spaces", "watch-me-node0-1")}, False),
        ({("spaces", "watch-you-node0-1"), ("others", "policy-0-1-ab")}, True),
        (set(), True),
    ],
)
def test_a_group_of_which_nothing_lives_is_left_over(living, is_left_over):
    assert RECORD.is_left_over(living, WATCH) is is_left_over


def test_a_group_is_meant_by_its_name_or_by_that_and_its_driver():
    record = replace(RECORD, driver="login-1:4711")
    assert record.is_meant_by("policy") and record.is_meant_by("policy@login-1:4711")
    for other in ("", "polic", "policy@login-1:4712", "@login-1:4711", "policy@"):
        assert not record.is_meant_by(other)
