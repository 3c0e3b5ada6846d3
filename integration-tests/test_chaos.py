"""The chaos suite: its plan, its accounts, what it finds left behind, its journal; and a short run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from chaos.accounting import Book  # noqa: E402
from chaos.elsewhere import ROUNDS  # noqa: E402
from chaos.faults import KINDS, planned, quotas  # noqa: E402
from chaos.journal import Journal, Outcome, alone  # noqa: E402
from chaos.leaks import (  # noqa: E402
    Look,
    actor_class,
    count_actors,
    count_others,
    leases_of,
    left,
    locks_of,
    orphans_of,
    settled,
)
from chaos.report import exit_code, rows, troubles  # noqa: E402
from chaos.run import INTERRUPTED, main  # noqa: E402

from raycrew.cluster_core import lease_ports  # noqa: E402


def test_a_seed_always_gives_the_same_plan_and_another_one_another():
    assert planned(3, 200) == planned(3, 200) != planned(4, 200)
    assert [fault.number for fault in planned(3, 200)] == list(range(200))


def test_a_long_plan_has_each_kind_at_each_of_its_moments_within_its_limits():
    faults = planned(1, 1000)
    assert len(faults) == 1000
    for kind in KINDS:
        found = [fault for fault in faults if fault.kind == kind.name]
        assert len(found) >= 20
        assert {fault.moment for fault in found} == set(kind.moments)
        assert all(0 <= fault.delay_s <= kind.latest_s for fault in found)
        assert all(kind.lasts_s[0] <= fault.lasts_s <= kind.lasts_s[1] for fault in found)
        assert {fault.may_fail for fault in found} == {kind.may_fail}
    stopped = [fault.lasts_s for fault in faults if fault.kind == "stopped control service"]
    assert stopped.count(20.0) >= 20 and min(stopped) < 20.0


def test_there_is_a_round_for_each_kind():
    assert [*ROUNDS] == [kind.name for kind in KINDS]


def test_a_plan_of_some_kinds_has_no_others():
    assert {fault.kind for fault in planned(1, 5, ["stolen port"])} == {"stolen port"}
    with pytest.raises(ValueError, match=r"of these kinds: killed worker.*not 5 of \['flood'\]"):
        planned(1, 5, ["flood"])
    with pytest.raises(ValueError, match="at least one fault"):
        planned(1, 0)


def test_quotas_are_in_proportion_and_leave_nobody_out():
    assert quotas([40, 22, 2.5], 3) == [1, 1, 1]
    assert quotas([1, 1, 2], 7) == [2, 2, 3]
    assert quotas([1, 2], 1) == [0, 1]
    assert sum(quotas([kind.share for kind in KINDS], 997)) == 997


def test_each_item_is_accounted_for():
    book = Book()
    for item in ("fine", "silent", "again", "fails"):
        book.send(item, 1, again=item == "again")
    book.answer("fine", 1)
    book.fail("again", TimeoutError("late"), named=True)
    book.fail("fails", ValueError("rank 1"), named=True)
    account = book.account({"fine": 1})
    assert (account.sent, account.answered, account.failed) == (4, 1, 1)
    assert account.lost == ("silent (nothing was heard of it)", "again (TimeoutError: late)")
    assert (account.twice, account.wrong, account.is_whole) == ((), (), False)
    with pytest.raises(ValueError, match="fine was sent before"):
        book.send("fine", 1, again=True)


def test_an_error_that_names_nothing_is_a_loss():
    book = Book(may_fail=True)
    book.send("named", 1, again=True)
    book.send("unnamed", 1, again=True)
    book.fail("named", "killed", named=True)
    book.fail("unnamed", "?", named=False)
    account = book.account({})
    assert account.failed == 1 and account.lost == ("unnamed (str: ?)",)
    book.may_fail = False
    book.send("later", 1, again=True)
    book.fail("later", "killed", named=True)
    assert book.account({}).lost == ("unnamed (str: ?)", "later (str: killed)")


def test_what_comes_or_runs_twice_and_what_never_ran_or_is_another_answer_is_found():
    book = Book()
    for item in ("doubled", "ran twice", "never ran", "other", "fine"):
        book.send(item, 1, again=item in ("doubled", "fine"))
        book.answer(item, 2 if item == "other" else 1)
    book.answer("doubled", 1)
    book.answer("stray", 1)
    account = book.account({"ran twice": 2, "other": 1, "fine": 2})
    assert account.twice == ("doubled", "ran twice")
    assert account.wrong == ("never ran", "other", "stray")
    assert account.answered == 1, "an item that may run again may have run twice"


def test_what_is_left_behind_is_named():
    actors, others = {"Member": 2, "Watch": 1}, {"keeper": 1, "raylet": 1, "monitor": 1}
    before = Look((), actors, others, placement_groups=frozenset({"a"}), leases=6, locks=2)
    assert left(before, before) == ()
    now = Look(
        orphans=("7: sleep 3600",),
        actors={"Member": 3},
        others={"keeper": 2, "raylet": 1},
        placement_groups=frozenset({"a", "b"}),
        shared=4,
        leases=8,
        locks=1,
    )
    assert left(before, now) == (
        *("process 7: sleep 3600", "actors: +1 Member", "actors: -1 Watch", "processes: +1 keeper"),
        *("placement group b", "4 more files of shared memory", "2 more port leases"),
    )


def test_what_ends_in_a_moment_is_no_leak():
    looks = iter([Look(leases=2), Look(leases=1), Look()])
    assert settled(Look(), lambda: next(looks)) == ()
    assert settled(Look(), lambda: Look(locks=1), timeout_s=0) == ("1 more locks of files",)


def test_processes_are_read_by_their_marks_and_titles():
    marked = {1: {"a"}, 2: {"a", "b"}, 3: {"b"}, 4: {"c"}}
    assert orphans_of(marked, [1]) == [3, 4]
    assert orphans_of(marked, [1, 3, 9]) == [4]
    titles = [
        b"ray::Member",
        b"ray::Member.answer  \0",
        b"ray::IDLE",
        b"ray::IDLE_SpillWorker",
        b"python\0run.py",
        b"ray::Watch.look()",
    ]
    assert [actor_class(title) for title in titles] == ["Member", "Member", "", "", "", "Watch"]
    assert count_actors(titles) == {"Member": 2, "Watch": 1}
    lines = dict(enumerate([*titles, b"sleep\0003600\0", b"python\0run.py"]))
    assert count_others(lines, workers={6}) == {"python run.py": 2}


def test_port_leases_and_locks_are_counted_by_process(tmp_path):
    with lease_ports(3):
        assert leases_of([os.getpid()]) == 3
        assert leases_of([os.getppid()]) == 0
    assert leases_of([os.getpid()]) == 0
    table = tmp_path / "locks"
    table.write_text(
        "1: FLOCK  ADVISORY  WRITE 7 fe:00:1 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 8 fe:00:1 0 EOF\n"
    )
    assert [locks_of({pid}, str(table)) for pid in (7, 8, 9)] == [1, 1, 0]


def outcome(number, **more):
    return Outcome(
        number, more.pop("kind", "killed worker"), "dispatch", more.pop("result", "recovered"), **more
    )


def test_a_journal_is_resumed_where_it_ended_even_in_the_midst_of_a_line(tmp_path):
    path, run = tmp_path / "journal", {"seed": 1, "faults": 3, "only": []}
    done = outcome(0, wrong=("lost: 0-1",), leaked=("process 7",), stall_s=1.5)
    Journal(path, run, resume=False).add(done)
    with path.open("a") as file:
        file.write('{"number": 1, "ki')
    again = Journal(path, run, resume=True)
    assert again.outcomes == {0: done}
    again.add(outcome(1))
    assert list(Journal(path, run, resume=True).outcomes) == [0, 1]
    assert json.loads(path.read_text().partition("\n")[0]) == {"run": run}
    with pytest.raises(ValueError, match=r"there already.*--resume"):
        Journal(path, run, resume=False)
    with pytest.raises(ValueError, match="is of another run"):
        Journal(path, run | {"seed": 2}, resume=True)


def test_two_runs_have_no_journal_in_common(tmp_path):
    arguments = ["--faults", "1", "--journal", str(tmp_path / "journal"), "--resume"]
    with alone(tmp_path / "journal"), pytest.raises(ValueError, match=r"another run writes .*journal"):
        main(arguments)
    with alone(tmp_path / "journal"):
        pass


def test_a_run_that_is_interrupted_says_how_it_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("chaos.run.carry_out", interrupted)
    journal = tmp_path / "chaos.jsonl"
    assert main(["--journal", str(journal)]) == INTERRUPTED
    assert f"--resume goes on with what {journal} has" in " ".join(capsys.readouterr().out.split())


def test_the_report_counts_by_kind_and_only_a_whole_run_without_losses_is_fine():
    good = [outcome(0, stall_s=2.0), outcome(1, kind="killed driver", by_design=3)]
    assert [(row.kind, row.injected, row.longest_stall_s, row.by_design) for row in rows(good)] == [
        ("killed driver", 1, 0.0, 3),
        ("killed worker", 1, 2.0, 0),
        ("all", 2, 2.0, 3),
    ]
    skipped = outcome(2, kind="full disk", result="skipped", notes="nothing can be mounted here")
    assert [exit_code(good, 2), exit_code(good, 3), exit_code([*good, skipped], 3)] == [0, 3, 0]
    assert exit_code([skipped], 1) == 3, "nothing was tried"
    for bad in (
        outcome(2, wrong=("lost: 2-0",)),
        outcome(2, leaked=("process 7",)),
        outcome(2, result="hung"),
    ):
        assert exit_code([*good, bad], 3) == 1
    told = troubles([*good, outcome(2, leaked=("process 7",), notes="odd"), skipped])
    assert told == [
        "2: killed worker in the midst of dispatch: recovered\n    left: process 7\n    note: odd",
        "full disk: skipped: nothing can be mounted here",
    ]


def run_of(tmp_path, *options):
    """A run in a process of its own, which has to be fine: its outcomes, and its options."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environ.pop("RAY_ADDRESS", None)
    command = [
        *(sys.executable, "-m", "chaos.run", *options),
        *("--journal", str(tmp_path / "journal")),
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    outcomes = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()[1:]]
    return outcomes, command[3:]


@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.parametrize(
    ("seed", "moments"),
    [
        (14, ["transfer", "dispatch"]),
        pytest.param(13, ["shutdown", "resize", "startup", "takeover", "turns"], marks=pytest.mark.long),
    ],
)
def test_a_short_run_loses_and_leaks_nothing(tmp_path, seed, moments):
    faults = ("--faults", str(len(moments)), "--seed", str(seed), "--only", "killed worker")
    outcomes, options = run_of(tmp_path, *faults)
    assert [(each["moment"], each["result"]) for each in outcomes] == [(m, "recovered") for m in moments]
    assert main([*options, "--resume"]) == 0, "nothing was left to do"
