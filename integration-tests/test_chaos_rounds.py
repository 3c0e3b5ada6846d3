"""What the chaos suite makes of faults that leak, miss or hang: its verdicts, without Ray."""

import contextlib
import os
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from chaos import driver, guests, rounds, run  # noqa: E402
from chaos.elsewhere import ROUNDS  # noqa: E402
from chaos.faults import Fault  # noqa: E402
from chaos.journal import Journal, Outcome  # noqa: E402
from chaos.leaks import Look, left, run_processes, settled  # noqa: E402
from chaos.playing import Round  # noqa: E402
from chaos.report import exit_code, rows, troubles  # noqa: E402
from chaos.rounds import sync_or_fail  # noqa: E402
from chaos.run import main  # noqa: E402
from chaos.standing import RESTARTS, Standing  # noqa: E402
from chaos.strike import MissedError, kill, slow_down, stop, striking, wait_for  # noqa: E402
from chaos.workers import checksum  # noqa: E402

from raycrew.tensor_transport import TransportError, TransportTimeoutError  # noqa: E402
from raycrew.worker_groups import WorkerFailureError  # noqa: E402

NOBODY = (1 << 22) + 1
"""No process has a number above the kernel's largest."""


class Stands:
    """What stands, without Ray: what is left behind is put into it, and updates end as they are told to."""

    update_s, deadline_s = 60.0, 120.0

    def __init__(self, *errors):
        self.errors, self.left, self.before, self.renewed = iter(errors), Look(), Look(), 0
        self.folders = ()
        self.group = types.SimpleNamespace(generation=0)

    def look(self):
        return self.left

    def sync(self):
        if (error := next(self.errors, None)) is not None:
            raise error
        return 1

    def renew(self):
        self.renewed += 1

    def victim(self, _fault):
        return NOBODY

    def ran(self):
        return {}

    def answers(self, *_):
        """They do."""

    expect_sessions = renew_if_worn = answers


def fault(kind="killed worker", moment="dispatch", number=0, lasts_s=0.0):
    return Fault(number, kind, moment, 0, 0.0, lasts_s)


def outcome(number, result="recovered", **more):
    return Outcome(number, "killed worker", "dispatch", result, **more)


def played(monkeypatch, round_of, stands, number=0):
    monkeypatch.setattr(run, "settled", partial(settled, timeout_s=0))
    monkeypatch.setitem(ROUNDS, "killed worker", round_of)
    return run.played(fault(number=number), stands)


def test_a_leak_is_charged_to_the_fault_that_left_it_and_to_no_later_one(monkeypatch):
    stands = Stands()
    leaky = Look(
        ("7: sleep 3600",),
        {"Member": 3},
        {"keeper": 1},
        frozenset({"a"}),
        shared=4,
        leases=8,
        locks=1,
    )

    def leak(_):
        stands.left = leaky

    leaked = played(monkeypatch, leak, stands).leaked
    assert leaked == left(Look(), leaky) and len(leaked) == 7
    assert played(monkeypatch, lambda _: None, stands).leaked == ()
    stands.left = Look(
        ("7: sleep 3600", "8: sleep 3600"), leaky.actors, leaky.others, leaky.placement_groups, 3
    )
    assert played(monkeypatch, lambda _: None, stands).leaked == ("process 8: sleep 3600",)
    assert stands.before.shared == 4, "room for what is kept to be used again stays"


def test_a_fault_that_happens_to_nobody_is_no_fault_that_was_borne(monkeypatch):
    def into_the_void(this):
        this.book.send("1", 1, again=True)
        with this.striking(partial(kill, NOBODY)):
            this.book.answer("1", 1)

    missed = played(monkeypatch, into_the_void, Stands())
    assert (missed.result, missed.answered) == ("missed", 1)
    assert missed.notes == f"process {NOBODY} had ended before"
    assert [(row.injected, row.recovered, row.missed) for row in rows([missed])] == [(0, 0, 1)] * 2
    assert exit_code([outcome(1), missed], 2) == 3, "it is still to do"
    assert exit_code([outcome(1), outcome(0, result="missed", wrong=("lost: 0-1",))], 2) == 1
    assert troubles([missed]) == [
        f"0: killed worker in the midst of dispatch: missed\n    note: {missed.notes}"
    ]


@pytest.mark.parametrize(
    "act",
    [
        partial(kill, NOBODY),
        partial(stop, NOBODY, 60.0),
        partial(slow_down, NOBODY, 60.0),
        partial(wait_for, "a new worker", lambda: None, 0.0),
    ],
)
def test_a_strike_that_finds_nobody_says_so(act):
    with striking(0.0, act) as strike:
        pass
    assert strike.missed and strike.done
    with pytest.raises(MissedError, match=strike.missed):
        act()


@pytest.fixture
def sleeping(monkeypatch):
    """A process of this run."""
    monkeypatch.setenv(run.RUN, f"strikes {os.getpid()}")
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("act", [kill, partial(stop, lasts_s=0.0), partial(slow_down, lasts_s=0.0)])
def test_nobody_is_struck_who_has_got_the_id_of_a_process_of_this_run(monkeypatch, sleeping, act):
    monkeypatch.setenv(run.RUN, "another one")
    with pytest.raises(MissedError, match=f"process {sleeping.pid} had ended before"):
        act(sleeping.pid)
    assert sleeping.poll() is None


def test_who_is_stopped_and_killed_meanwhile_is_not_looked_for_again(sleeping):
    with striking(0.0, partial(stop, sleeping.pid, 0.2)) as stopped:
        while not stopped.began:
            time.sleep(0.01)
        kill(sleeping.pid)
        assert sleeping.wait(60) == -9
    assert stopped.done and not stopped.missed


def test_what_missed_is_tried_again_when_a_run_is_resumed(tmp_path, monkeypatch):
    tried = []

    def carry_out(faults, journal, _chosen, _screen):
        for each in faults:
            tried.append(each.number)
            journal.add(outcome(each.number, result="missed" if tried == [0] else "recovered"))

    monkeypatch.setattr(run, "carry_out", carry_out)
    arguments = ["--faults", "2", "--only", "killed worker", "--journal", str(tmp_path / "journal")]
    assert main(arguments) == 3
    assert main([*arguments, "--resume"]) == 0
    assert tried == [0, 1, 0]


def test_a_run_of_no_minutes_begins_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "standing", lambda *_: contextlib.nullcontext(Stands()))
    monkeypatch.setattr(run, "played", lambda *_: pytest.fail("a fault was begun"))
    monkeypatch.setenv(run.RUN, "this one")
    journal = str(tmp_path / "journal")
    assert main(["--faults", "2", "--only", "killed worker", "--journal", journal, "--minutes", "0"]) == 3


LATE = TransportTimeoutError("version 2 was not there in time")


@pytest.mark.parametrize("error", [LATE, WorkerFailureError("rank 1 failed", cause=LATE)])
def test_an_update_that_hangs_until_its_time_is_up_is_broken(monkeypatch, error):
    stands = Stands(None, error)
    monkeypatch.setattr("chaos.rounds.kill", lambda *_: None)
    hung = run.played(fault(moment="update"), stands)
    assert hung.result == "broken" and str(error) in hung.notes
    assert stands.renewed == 1 and exit_code([hung], 1) == 1


def test_an_update_may_fail_of_a_fault_and_hang_as_long_as_it_lasts(monkeypatch):
    sync_or_fail(Stands(TransportError("given up")), lasts_s=0.0)
    sync_or_fail(Stands(WorkerFailureError("rank 1 died")), lasts_s=0.0)
    sync_or_fail(Stands(LATE), lasts_s=60.0)
    clock = iter([0.0, 60.0])
    monkeypatch.setattr("chaos.rounds.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(TransportError, match="given up"):
        sync_or_fail(Stands(TransportError("given up")), lasts_s=0.0)


HANGS = """
import os, subprocess, sys, threading
from pathlib import Path
from chaos.faults import planned
from chaos.journal import Journal
from chaos.leaks import RUN
from chaos.watchdog import watched
folder, run = Path(sys.argv[1]), os.environ[RUN]
(folder / "shared").mkdir()
(folder / "shared" / "arena").write_bytes(b"arena")
print(subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL).pid, flush=True)
fault, journal = planned(0, 1)[0], Journal(folder / "journal", {}, resume=False)
with watched(fault, journal, run, 0.01, [folder / "shared"]):
    threading.Event().wait()
"""


def test_a_round_that_hangs_leaves_no_process_and_no_folder(tmp_path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        env=environ | {run.RUN: f"hangs {os.getpid()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "most recent call first" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    assert Journal(tmp_path / "journal", {}, resume=True).outcomes[0].result == "hung"
    assert int(done.stdout) not in run_processes(f"hangs {os.getpid()}")


class Answering:
    """A group without Ray that answers a little late; tells how many items are under way."""

    def __init__(self):
        self.under_way = 0

    def on(self, ranks):
        return self

    def call(self, _method, item, load):
        self.under_way += 1

        def get_results(timeout):
            time.sleep(0.001)
            self.under_way -= 1
            return [(item, checksum(load))]

        return types.SimpleNamespace(get_results=get_results)


@pytest.mark.parametrize("kind", ["killed worker", "flapping worker"])
def test_a_worker_is_struck_while_items_are_under_way(kind, monkeypatch):
    stands, struck = Stands(), []
    stands.group = group = Answering()
    monkeypatch.setattr(guests, "fresh", lambda *_: NOBODY - 1)
    monkeypatch.setattr(stands, "ours", set, raising=False)

    def strike(pid):
        for _ in range(100):
            struck.append((pid, group.under_way))
            time.sleep(0.0005)

    monkeypatch.setattr(rounds, "kill", strike)
    done = Round(fault(kind), stands)
    ROUNDS[kind](done)
    assert {pid for pid, _ in struck} == ({NOBODY} if kind == "killed worker" else {NOBODY, NOBODY - 1})
    assert all(n_items > 0 for _, n_items in struck)
    assert group.under_way == 0 and not done.missed
    assert done.book.account({}).lost == ()


class Balancing:
    """A balancer without Ray: what it gives of each item of a stream is what the test says."""

    def __init__(self, gives=lambda answer: [answer]):
        self.balancer, self.gives, self.once = self, gives, []

    def as_completed(self, method, items, *, timeout, common_kwargs):
        assert (method, timeout) == ("answer", Stands.deadline_s)
        for index, item in enumerate(items):
            for given in self.gives((item, checksum(common_kwargs["load"]))):
                yield index, given

    def call(self, method, item, load):
        self.once.append(item)
        return types.SimpleNamespace(get_results=lambda timeout: [(item, checksum(load))])


def resized(monkeypatch, group):
    """The round in which a worker is killed while workers come and go; whom it struck, and the account."""
    stands, struck = Stands(), []
    stands.group = group
    monkeypatch.setattr(stands, "ours", lambda: {NOBODY, NOBODY + 1}, raising=False)
    monkeypatch.setattr(rounds, "kill", struck.append)

    def come_and_go(until):
        while not until():
            time.sleep(0.01)

    monkeypatch.setattr(stands, "come_and_go", come_and_go, raising=False)
    this = Round(Fault(0, "killed worker", "resize", 3, 0.05, 0.0), stands)
    ROUNDS["killed worker"](this)
    assert struck == [NOBODY + 1] and not this.missed
    return this.book.account(dict.fromkeys(group.once, 1))


def test_all_items_are_accounted_for_while_workers_come_and_go(monkeypatch):
    whole = resized(monkeypatch, Balancing())
    assert whole.is_whole and whole.answered == whole.sent > 1
    assert resized(monkeypatch, Balancing(lambda answer: [answer] * 2)).twice
    assert resized(monkeypatch, Balancing(lambda _: [])).lost
    others = resized(monkeypatch, Balancing(lambda answer: [("another", answer[1])]))
    assert others.wrong and others.lost


def test_a_change_of_size_is_tried_again_until_it_is_done(monkeypatch):
    asked, restarted = [], []

    class Group:
        world_size = 2

        def resize(self, n, timeout):
            asked.append(n)
            if len(asked) == 1:
                raise WorkerFailureError("a new worker died")
            self.world_size = n

        def restart_failed_workers(self):
            restarted.append(self.world_size)

    stands = types.SimpleNamespace(group=Group(), deadline_s=60.0, _changes=0)
    Standing.resize(stands, 1)
    assert (asked, restarted, stands.group.world_size) == ([1, 1], [2], 1)
    stands.group.world_size, stands.deadline_s = 2, 0.0
    asked.clear()
    with pytest.raises(WorkerFailureError, match="a new worker died"):
        Standing.resize(stands, 1)


def test_a_group_is_worn_by_restarts_alone(monkeypatch):
    class Group:
        world_size, generation = 2, 0

        def resize(self, n, timeout):
            self.world_size, self.generation = n, self.generation + 1

        def renew_rendezvous(self):
            self.generation += 1

        def restarted(self):
            self.generation += 1

    stands = object.__new__(Standing)
    stands.group, stands.deadline_s, renewed = Group(), 60.0, []
    monkeypatch.setattr(Standing, "renew", lambda self: renewed.append(self.group.generation))
    stands.come_and_go(lambda: stands.group.generation >= 4)
    stands.renew_rendezvous()
    for used in range(RESTARTS):
        stands.renew_if_worn(fault())
        assert renewed == []
        if used + 2 <= RESTARTS:
            stands.renew_if_worn(fault("flapping worker"))
        assert renewed == []
        stands.group.restarted()
    stands.renew_if_worn(fault())
    assert renewed == [5 + RESTARTS]
    stands.group.generation -= 1
    stands.renew_if_worn(fault("flapping worker"))
    assert renewed == [5 + RESTARTS, 4 + RESTARTS], "the second of its restarts would be one too many"


def test_a_driver_always_has_items_under_way():
    told, group = [], types.SimpleNamespace()
    checksum = driver.checksum(driver.np.arange(1 << 16, dtype=driver.np.uint8))
    group.call = lambda _method, item, _load: types.SimpleNamespace(
        get_results=lambda timeout: [(item, checksum)]
    )
    driver.work(group, range(9), told.append)
    verbs = [line.split()[0] for line in told]
    under_way = [verbs[:i].count("sent") - verbs[:i].count("answered") for i in range(1, len(told) + 1)]
    assert under_way[-1] == 0 and all(under_way[:-1])
    assert sorted(told[-1:]) == ["answered 8 8"] and verbs.count("answered") == 9
