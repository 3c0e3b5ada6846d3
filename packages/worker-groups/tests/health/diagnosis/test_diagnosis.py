"""What a diagnosis says of each rank, whatever is known of it; no Ray is needed."""

import json
import threading

import pytest
from patience import eventually

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RunningCall, WorkerGroupClosedError, WorkerGroupError
from raycrew.worker_groups._health import UnansweredError
from raycrew.worker_groups._health.diagnosis import Wanted, asking
from raycrew.worker_groups._health.diagnosis.diagnosis import Diagnosis, diagnosed, who_is
from raycrew.worker_groups._health.diagnosis.making import ALL, Subjects, make
from raycrew.worker_groups._health.diagnosis.parts import Findings
from raycrew.worker_groups._health.diagnosis.writing import new_folder, write
from raycrew.worker_groups._health.questions import by_node
from raycrew.worker_groups._health.reports import Seen
from raycrew.worker_groups.sharding import WorkerFacts, assign_ranks
from raycrew.worker_groups.testing import InProcessGroup

FACTS = [
    WorkerFacts("node-a", "10.0.0.1", 41, "cuda", 3),
    WorkerFacts("node-a", "10.0.0.1", 42),
    WorkerFacts("node-b", "10.0.0.2", 43),
]
INFOS = assign_ranks([0, 1, 2], FACTS, [5, 6, 7], "trainers")
BUSY = {
    "is_alive": True,
    "is_told": True,
    "beat_age_s": 0.5,
    "calls": [("train", 7, 12.34, 3.0)],
    "private_bytes": 12_345_678_901,
}
ANSWERS = [
    {
        "seen": BUSY,
        "stacks": ("in train", "py-spy"),
        "output": ("loss 1.5", ""),
        "record": ("/own_0", b"nccl", ""),
    },
    {"seen": {"is_alive": False}, "stacks": ("its process has ended", ""), "output": ("", "no file")},
    None,
]


@pytest.fixture
def diagnosis(tmp_path):
    found = [Findings.nothing("its node is gone") if a is None else Findings.of(a) for a in ANSWERS]
    told_to_write = [["/told_", "/own_"], [], []]
    ranks = tuple(map(diagnosed, map(who_is, INFOS, FACTS), found, told_to_write))
    return Diagnosis("trainers", "mine.Trainer", 2, "no progress", 0.0, ranks, tmp_path)


def test_each_rank_is_told_of_with_what_is_missing_and_why(diagnosis):
    busy, dead, unanswered = diagnosis.ranks
    assert [rank.state for rank in diagnosis.ranks] == ["busy", "dead", "unanswered"]
    assert (busy.device, busy.bundle_index, busy.pid) == ("cuda:3", 5, 41)
    assert busy.calls == (RunningCall("train", 7, 12.34, 3.0),)
    assert (busy.stacks, busy.told_by, busy.output) == ("in train", "py-spy", "loss 1.5")
    assert (busy.flight_record, busy.missing) == ("flight-recorder/rank_0", {})
    assert (busy.flight_record_path, busy.flight_record_is_own) == ("/own_0", True)
    assert (dead.stacks, dead.told_by, dead.flight_record) == ("", "", "")
    assert dead.missing == {"stacks": "its process has ended", "output": "no file"}
    assert unanswered.missing == {"state": "its node is gone"}
    assert (unanswered.calls, unanswered.numbers) == ((), {})


def test_the_text_has_it_all(diagnosis):
    head, busy, dead, unanswered = diagnosis.text.split("\n\n")
    assert head.splitlines() == [
        "trainers (mine.Trainer), generation 2, at 1970-01-01 00:00:00+00:00",
        "reason: no progress",
        "3 ranks: 1 busy, 1 dead, 1 unanswered",
    ]
    assert busy.splitlines() == [
        "== rank 0: busy, 'train' (call 7) for 12.3 s, 3.0 s since its last sign",
        "pid 41 on 10.0.0.1 (node-a), bundle 5, cuda:3",
        "beat_age_s 0.5, private_bytes 12,345,678,901",
        "-- stacks, by py-spy",
        "in train",
        "-- last lines of its output",
        "loss 1.5",
        "-- what the recorder of its collectives wrote",
        "flight-recorder/rank_0, from /own_0",
    ]
    assert dead.splitlines() == [
        "== rank 1: dead",
        "pid 42 on 10.0.0.1 (node-a), bundle 6, cpu",
        "-- no stacks, or not all: its process has ended",
        "-- no output, or not all: no file",
    ]
    assert unanswered.splitlines() == [
        "== rank 2: unanswered",
        "pid 43 on 10.0.0.2 (node-b), bundle 7, cpu",
        "how it is can't be told: its node is gone",
    ]


def test_who_stands_by_is_told_of_after_the_ranks_and_keeps_no_records(tmp_path, monkeypatch):
    asked = {}

    def ask(method, workers, timeout_s, *, details, patience_s):
        asked.update(details)
        facts = [workers[key] for key in by_node(workers)["node-a"]]
        return {"node-a": [{"seen": {"is_alive": own is not FACTS[0]}} for own in facts]}

    monkeypatch.setattr(asking, "ask", ask)
    subjects = Subjects("mine.Trainer", INFOS[:1], FACTS[:1], {}, standbys=[(9, FACTS[1])])
    found = asking.examine(subjects.processes, {}, ALL, 5.0)
    diagnosis = make("trainers", subjects, found, "no progress", 0.0, tmp_path)
    assert [details.get("rank") for details in asked.values()] == [0, None]
    assert [(one.rank, one.pid, one.state) for one in diagnosis.ranks] == [(0, 41, "dead")]
    (standby,) = diagnosis.standbys
    assert (standby.rank, standby.pid, standby.bundle_index, standby.state) == (-1, 42, 9, "alive")
    head, _, told = diagnosis.text.split("\n\n")
    assert head.splitlines()[-2:] == ["1 rank: 1 dead", "1 standing by: 1 alive"]
    assert told.splitlines()[:2] == ["== standby: alive", "pid 42 on 10.0.0.1 (node-a), bundle 9, cpu"]
    written = json.loads((diagnosis.folder / "diagnosis.json").read_text())
    assert [one["pid"] for one in written["standbys"]] == [42]


@pytest.mark.hostile
@pytest.mark.parametrize("told_to_write", [[], ["/tmp/own_", "/tmp/nccl_trace_rank_1"]])
def test_what_another_groups_rank_may_have_recorded_is_not_taken_for_this_ones(tmp_path, told_to_write):
    """Rank 0 of the trainers and of the generators are on one node, and write to the usual place."""
    usual = "/tmp/nccl_trace_rank_0"
    found = {0: Findings.of({"seen": BUSY, "record": (usual, b"nccl", "")})}
    subjects = Subjects("mine.Trainer", INFOS[:1], FACTS[:1], {}, {0: told_to_write} if told_to_write else {})
    diagnosis = make("trainers", subjects, found, "no progress", 0.0, tmp_path)
    (rank,) = diagnosis.ranks
    assert (rank.flight_record_path, rank.flight_record_is_own) == (usual, False)
    assert (
        f"rank_0, from {usual}, which rank 0 of another group on that node may have written" in diagnosis.text
    )
    (told,) = json.loads((diagnosis.folder / "diagnosis.json").read_text())["ranks"]
    assert (told["flight_record_path"], told["flight_record_is_own"]) == (usual, False)


def test_it_is_left_as_text_and_as_json_for_the_user_alone(diagnosis, tmp_path):
    write(diagnosis, {"flight-recorder/rank_0": b"nccl"})
    assert (tmp_path / "diagnosis.txt").read_text() == diagnosis.text
    told = json.loads((tmp_path / "diagnosis.json").read_text())
    assert told == json.loads(json.dumps(diagnosis.as_dict()))
    assert (told["version"], told["folder"], told["generation"]) == (1, str(tmp_path), 2)
    first = told["ranks"][0]
    assert first["calls"] == [{"method": "train", "sequence": 7, "running_s": 12.34, "silent_s": 3.0}]
    assert (first["state"], first["stacks"], first["missing"]) == ("busy", "in train", {})
    assert (tmp_path / "flight-recorder/rank_0").read_bytes() == b"nccl"
    folders = [new_folder("my/../group", tmp_path / "deep/er") for _ in range(2)]
    assert len({*folders}) == 2
    for folder in folders:
        assert folder.parent == tmp_path / "deep/er"
        assert folder.name.startswith("raycrew-diagnosis-my_.._group-")
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.hostile
def test_ranks_of_a_node_that_does_not_answer_are_told_of_beside_the_others(monkeypatch):
    def ask(method, workers, timeout_s, *, details, patience_s):
        assert (method, list(workers)) == ("examine", [2, 0, 1])
        assert timeout_s + patience_s == pytest.approx(10)
        share_bytes = asking.ALL_BYTES // 3
        assert details[0] == {"stacks": True, "rank": 0, "prefixes": ["/told_"], "share_bytes": share_bytes}
        assert details[2]["prefixes"] == []
        return {"node-a": ANSWERS[:2], "node-b": UnansweredError("it is gone", node_is_gone=True)}

    monkeypatch.setattr(asking, "ask", ask)
    workers = {rank: FACTS[rank] for rank in (2, 0, 1)}
    found = asking.examine(workers, {0: ["/told_"]}, Wanted(stacks=True, records=True), 10.0)
    assert list(found) == [0, 1, 2]
    assert (found[0].stacks, found[1].seen.state) == ("in train", "dead")
    assert found[2] == Findings(missing={"state": "it is gone"})


class Sitter:
    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def sit(self) -> bool:
        return self.gate.wait(60)


def test_a_group_of_this_process_is_diagnosed_too(tmp_path):
    gate = threading.Event()
    with InProcessGroup(FakeCluster([2]), Sitter, gate=gate) as group:
        sitting = group.on(ranks=[1]).call("sit")
        try:
            eventually(lambda: group.get_worker_status()[1] == "busy", "it sits")
            diagnosis = group.diagnose(tmp_path, reason="to see")
        finally:
            gate.set()
        idle, busy = diagnosis.ranks
        assert (idle.state, busy.state, busy.calls[0].method) == ("ready", "busy", "sit")
        assert "self.gate.wait(60)" in busy.stacks
        assert diagnosis.folder.parent == tmp_path
        assert "reason: to see" in (diagnosis.folder / "diagnosis.txt").read_text()
        assert sitting.get_results() == [True]
        (tmp_path / "file").touch()
        for wrong in (tmp_path / "file", tmp_path / "file" / "deeper"):
            with pytest.raises(ValueError, match=f"folder is '{wrong}', and {tmp_path}/file is no folder"):
                group.diagnose(wrong)
        (nowhere := tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=f"{nowhere} is no folder"):
            group.diagnose(nowhere)
        with pytest.raises(
            WorkerGroupError, match="rank 1 of 'Sitter' can't be had: it is this process's own"
        ):
            group.logs(1)
        for rank in (2, -1, "0", None):
            with pytest.raises(ValueError, match="they are 0 to 1"):
                group.logs(rank)
        for lines in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match="a whole number of at least 1"):
                group.logs(0, lines)
    for ask in (group.diagnose, lambda: group.logs(0)):
        with pytest.raises(WorkerGroupClosedError):
            ask()


def test_why_the_state_of_a_rank_of_this_process_is_not_known_is_told(tmp_path, monkeypatch):
    with InProcessGroup(FakeCluster([1]), Sitter, gate=threading.Event()) as group:
        monkeypatch.setattr(group, "_sights", lambda *_: {0: "nobody tells"})
        (rank,) = group.diagnose(tmp_path).ranks
    assert rank.state == "unanswered"
    assert rank.missing == {"state": "nobody tells", "output": "it is this process's own"}


def test_nothing_but_the_state_of_workers_is_asked_for_unless_that_is_wanted():
    assert Wanted() == Wanted(lines=None, stacks=False, records=False)


def test_what_was_found_of_a_worker_that_died_meanwhile_is_of_a_dead_one():
    found = Findings(seen=Seen(is_alive=True, is_told=True), output="its last words")
    assert (found.is_idle, found.of_dead().is_idle) == (True, False)
    assert (found.of_dead().seen.state, found.of_dead().output) == ("dead", "its last words")
    assert not Findings.nothing("no answer").is_idle
    assert Findings.nothing("no answer").of_dead() == Findings.nothing("no answer")
