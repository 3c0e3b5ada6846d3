"""Diagnoses that a group makes by itself where something goes wrong; no Ray is needed."""

import gc
import math
import pickle
import shutil
import threading
import weakref
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S, eventually
from ray.exceptions import TaskCancelledError

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import ResultTimeoutError, WorkerFailureError, WorkerFailuresError, current_worker
from raycrew.worker_groups._health.diagnosis import automatic, making
from raycrew.worker_groups._health.diagnosis.automatic import Diagnoses
from raycrew.worker_groups._health.diagnosis.making import Subjects, tell_of_start
from raycrew.worker_groups._health.diagnosis.parts import Findings
from raycrew.worker_groups.sharding import WorkerFacts, assign_ranks
from raycrew.worker_groups.testing import InProcessGroup

FACTS = WorkerFacts("node-a", "10.0.0.1", 41)


class Made:
    """Makes folders in place of diagnoses, at times that are set."""

    def __init__(self, folder):
        self.folder, self.reasons, self.now = folder, [], 100.0
        self.diagnoses = Diagnoses(self.make, lambda: self.now)

    def meanwhile(self):
        pass

    def make(self, reason):
        if reason == "it fails":
            raise OSError("no space left")
        self.reasons.append(reason)
        self.meanwhile()
        made = self.folder / str(len(self.reasons))
        made.mkdir()
        return SimpleNamespace(folder=made)


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def test_what_happens_at_once_has_one_and_nothing_is_told_of_twice(made, tmp_path):
    assert made.diagnoses.folder_for("first", ["a"]) == tmp_path / "1"
    made.now += 9.9
    assert made.diagnoses.folder_for("second", ["b"]) == tmp_path / "1"
    made.now += 0.1
    assert made.diagnoses.folder_for("a again", ["a"]) == tmp_path / "1"
    assert made.diagnoses.folder_for("both", ["a", "b"]) == tmp_path / "1"
    assert made.diagnoses.folder_for("third", ["a", "c"]) == tmp_path / "2"
    assert made.diagnoses.folder_for("a once more", ["a"]) == tmp_path / "2"
    made.now += 10
    shutil.rmtree(tmp_path / "2")
    assert made.diagnoses.folder_for("it is gone", ["c"]) == tmp_path / "3"
    assert made.reasons == ["first", "third", "it is gone"]


def test_the_first_and_the_last_ten_stay(made, tmp_path):
    for number in range(14):
        made.now += 10
        made.diagnoses.folder_for("why", [number])
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [1, *range(5, 15)]
    assert made.diagnoses.folder_for("one of those that went", [1]) == tmp_path / "14"
    assert made.diagnoses.folder_for("the first", [0]) == tmp_path / "1"


def test_one_that_was_removed_meanwhile_is_told_to_nobody(made, tmp_path):
    shutil.rmtree(made.diagnoses.folder_for("first", ["a"]))
    assert made.diagnoses.folder_for("at once", ["b"]) == tmp_path / "2"
    assert (tmp_path / "2").exists()


@pytest.mark.hostile
def test_a_handler_of_a_signal_that_comes_while_one_is_made_does_not_wait_for_it(made, tmp_path):
    """The thread that makes one comes back, and another one waits for what is made."""
    told, others = [], []

    def handle():
        told.append(made.diagnoses.folder_for("late, too", ["b"]))
        others.append(threading.Thread(target=ask_too, daemon=True))
        others[0].start()

    def ask_too():
        told.append(made.diagnoses.folder_for("meanwhile", ["c"]))

    made.meanwhile = handle
    making = threading.Thread(target=lambda: made.diagnoses.folder_for("late", ["a"]), daemon=True)
    making.start()
    making.join(PATIENCE_S)
    assert not making.is_alive(), "it waits for itself"
    others[0].join(PATIENCE_S)
    assert told == [None, tmp_path / "1"]
    assert made.diagnoses.folder_for("late, too", ["b"]) == tmp_path / "1"


@pytest.mark.hostile
def test_who_makes_one_for_too_long_is_not_waited_for(made, monkeypatch):
    monkeypatch.setattr(automatic, "_WAIT_S", 0.01)
    asked = []

    def ask_too():
        asked.append(made.diagnoses.folder_for("meanwhile", ["b"]))

    def hang():
        other = threading.Thread(target=ask_too, daemon=True)
        other.start()
        other.join(PATIENCE_S)

    made.meanwhile = hang
    assert made.diagnoses.folder_for("late", ["a"]) is not None
    assert asked == [None]


@pytest.mark.hostile
def test_one_that_fails_hides_nothing_and_is_not_tried_at_once_again(made, caplog):
    error = ResultTimeoutError("it fails", [0])
    made.diagnoses.tell(error, "a")
    assert (error.diagnosis, str(error)) == (None, "it fails")
    assert "no diagnosis could be made: OSError: no space left" in caplog.text
    made.diagnoses.tell(error, "a")
    assert made.diagnoses.folder_for("too soon", ["a"]) is None
    made.now += 10
    assert made.diagnoses.folder_for("later", ["a"]) is not None


def test_a_call_that_was_cancelled_needs_none(made):
    error = WorkerFailureError("cancelled", cause=TaskCancelledError())
    made.diagnoses.tell(error, "a")
    assert (error.diagnosis, made.reasons) == (None, [])


def test_each_part_of_an_error_says_where_it_lies_as_the_whole_does(made):
    parts = [WorkerFailureError(f"rank {rank} failed", rank=rank) for rank in range(2)]
    made.diagnoses.tell(error := WorkerFailuresError("both failed", parts), "a")
    try:
        raise error
    except* WorkerFailureError as failures:
        assert {part.diagnosis for part in failures.exceptions} == {error.diagnosis}
    assert error.diagnosis is not None and str(error).count("lies in") == 1


def test_errors_say_where_it_lies_also_from_afar(tmp_path):
    parts = [WorkerFailureError(f"rank {rank} failed", rank=rank) for rank in range(2)]
    for error in (ResultTimeoutError("late", [1]), parts[0], WorkerFailuresError("both failed", parts)):
        without = str(error)
        assert "lies in" not in without and pickle.loads(pickle.dumps(error)).diagnosis is None
        error.diagnosis = tmp_path
        assert str(error) == f"{without}\nwhat all ranks were at lies in {tmp_path}"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.derive(parts[:1]).diagnosis == tmp_path


class Sitter:
    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def sit(self) -> bool:
        return self.gate.wait(60)

    def fail(self) -> None:
        raise ValueError(f"rank {current_worker().rank} fails")


def test_a_group_that_nobody_has_is_given_back_at_once_though_it_makes_diagnoses(tmp_path, caplog):
    """Else its workers would live on until Python looks for cycles."""
    gc.disable()
    try:
        group = InProcessGroup(FakeCluster([1]), Sitter, gate=threading.Event(), diagnose=tmp_path)
        known, failing = weakref.ref(group), group.call("fail")
        del group
        assert known() is None
    finally:
        gc.enable()
    (error,) = failing.get_results(return_exceptions=True)
    assert (str(error.cause), error.diagnosis) == ("rank 0 fails", None)
    assert (
        "no diagnosis could be made: WorkerGroupError: the group that it would be of is gone" in caplog.text
    )


def starts_that_fail(folder, count):
    infos = assign_ranks([0], [FACTS], [0], "mine")
    for number in range(count):
        error = WorkerFailureError(f"start {number} failed")
        tell_of_start(error, "mine", Subjects("mine.Worker", infos, [FACTS], {}), folder)
        yield error.diagnosis


def test_of_starts_that_fail_again_and_again_the_first_and_the_last_ten_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "examine", lambda *_: {0: Findings.nothing("its node is gone")})
    made = list(starts_that_fail(tmp_path, 14))
    assert {*tmp_path.iterdir()} == {made[0], *made[-10:]}


@pytest.mark.hostile
def test_one_that_can_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fill(diagnosis, records):
        (diagnosis.folder / "diagnosis.txt").touch()
        raise OSError("no space left")

    monkeypatch.setattr(making, "examine", lambda *_: {0: Findings.nothing("its node is gone")})
    monkeypatch.setattr(making, "write", fill)
    assert list(starts_that_fail(tmp_path, 1)) == [None]
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_is_late_or_fails_and_a_stall_say_what_all_ranks_were_at(tmp_path, monkeypatch):
    monkeypatch.setattr(automatic, "_PAUSE_S", math.inf)
    gate = threading.Event()
    with InProcessGroup(FakeCluster([2]), Sitter, gate=gate, diagnose=tmp_path / "bundles") as group:
        with pytest.raises(WorkerFailureError) as failed:
            group.on(ranks=[0]).call("fail").get_results()
        folder = failed.value.diagnosis
        assert folder.parent == tmp_path / "bundles" and f"lies in {folder}" in str(failed.value)
        assert "reason: rank 0 of 'Sitter'" in (folder / "diagnosis.txt").read_text()
        sitting = group.on(ranks=[1]).call("sit")
        try:
            for _ in range(2):
                with pytest.raises(ResultTimeoutError) as late:
                    sitting.get_results(timeout=0.01)
                assert late.value.diagnosis == folder, "it is of this moment"
            (error,) = sitting.get_results(timeout=0.01, return_exceptions=True)
            assert error.diagnosis == folder
            eventually(lambda: group.detect_stuck_workers(0.01), "it is stuck")
            assert group.detect_stuck_workers(0.01)[1].diagnosis == folder
        finally:
            gate.set()
        assert sitting.get_results() == [True]
    assert list((tmp_path / "bundles").iterdir()) == [folder]


def test_nothing_is_made_unless_it_is_wanted():
    with InProcessGroup(FakeCluster([1]), Sitter, gate=threading.Event()) as group:
        with pytest.raises(WorkerFailureError) as failed:
            group.call("fail").get_results()
        assert failed.value.diagnosis is None
    for wrong in ("", 1, None, b"folder"):
        with pytest.raises(TypeError, match="diagnose is a folder, True or False"):
            InProcessGroup(FakeCluster([1]), Sitter, gate=threading.Event(), diagnose=wrong)
    with pytest.raises(ValueError, match="diagnose is '/dev/full', and /dev/full is no folder"):
        InProcessGroup(FakeCluster([1]), Sitter, gate=threading.Event(), diagnose="/dev/full")
