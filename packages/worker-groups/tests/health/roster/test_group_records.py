"""What a group leaves of itself to read."""

import json

import pytest

from raycrew.worker_groups._health.roster.records import GroupRecord, WorkerRecord, record_of

WORKERS = (
    WorkerRecord(0, "policy-0-0-ab", "node0", "10.0.0.1", 11, 100, 0, "cuda:3", 0, "pg", 0),
    WorkerRecord(1, "policy-0-1-ab", "node1", "10.0.0.2", 12, 200, 1),
)
RECORD = GroupRecord("policy", "app.Policy", "spaces", "me", 2, WORKERS)
WATCH = "watch-me-"


def test_what_is_left_is_read_again():
    text = RECORD.as_text()
    assert record_of(text) == RECORD
    entry = json.loads(text)
    assert entry["workers"][1]["pid"] == 12
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
        RECORD.as_text().replace('"policy"', "null"),
        RECORD.as_text().replace('"policy"', '["policy"]'),
        RECORD.as_text().replace('"rank": 1', '"rank": "1"'),
        RECORD.as_text().replace('"node_id": "node0"', '"node_id": 0'),
        RECORD.as_text().replace('"generation": 2', '"generation": 2.5'),
        RECORD.as_text().replace('"device": "cpu"', '"device": null'),
        RECORD.as_text()[:-1],
    ],
)
def test_what_is_no_record_is_none(text):
    assert record_of(text) is None


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
