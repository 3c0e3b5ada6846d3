"""The example verifier: its verdicts one by one, and a run of it as a user runs it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from raycrew.worker_groups import close_fan_out, fan_out

EXAMPLE = Path(__file__).parent.parent / "examples" / "verifier"
sys.path.insert(0, str(EXAMPLE))

import sandbox  # noqa: E402
from sandbox import Case, Limits, NoTestsError, Submission, judge, verify  # noqa: E402
from submissions import MEDIAN, PROGRAMS, make  # noqa: E402

EXPECTED = {
    "right": "passed",
    "wrong for even lengths": "wrong",
    "raises": "raised",
    "does not compile": "raised",
    "loops for ever": "killed",
    "sleeps for ever": "timeout",
    "takes all memory": "raised",
    "fills the disk": "raised",
    "exits with success": "killed",
    "is equal to everything": "raised",
    "leaves processes behind": "wrong",
    "reads secrets": "raised",
    "has no tests": "refused",
}
LIMITS = Limits(wall_s=10, cpu_s=1)


def program(source, *cases):
    return Submission("test", source, cases)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "sleeps for ever"])
def test_each_kind_of_program_gets_its_verdict(name, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "sesame")
    verdict = verify(Submission(name, PROGRAMS[name], MEDIAN), LIMITS)
    assert verdict.status == EXPECTED[name], verdict
    assert verdict.reward == (1.0 if name == "right" else 0.0)
    assert verdict.total == 3
    assert (verdict.detail == "") == (name == "right")


def test_a_program_that_only_waits_runs_out_of_time():
    verdict = verify(Submission("sleeps", PROGRAMS["sleeps for ever"], MEDIAN), Limits(wall_s=1))
    assert verdict.status == "timeout"
    assert "median([3, 1, 2])" in verdict.detail


def test_no_tests_is_an_error_and_never_a_pass():
    with pytest.raises(NoTestsError, match="'test' has no tests"):
        verify(program("pass"))


def test_all_tests_must_pass():
    cases = [Case("f(1)", 1), Case("f(2)", 5), Case("f(3)", 3)]
    verdict = verify(program("f = lambda x: x", *cases), LIMITS)
    assert (verdict.status, verdict.passed, verdict.detail) == ("wrong", 2, "f(2): 2, not 5")


@pytest.mark.parametrize(
    ("expression", "expected", "status"),
    [
        ("{'a': [1, (2.5, None)]}", {"a": [1, (2.5, None)]}, "passed"),
        ("b'x' + b'y'", b"xy", "passed"),
        ("'\\n[1]\\n' + chr(0x1F600)", "\n[1]\n\U0001f600", "passed"),
        ("1", True, "wrong"),
        ("1.0", 1, "wrong"),
        ("[1, (True, {'a': 1.0})]", [1, (True, {"a": 1.0})], "passed"),
        ("[True, 2]", [1, 2], "wrong"),
        ("(1.0,)", (1,), "wrong"),
        ("{'a': [1]}", {"a": [1.0]}, "wrong"),
        ("{1: 2}", {True: 2}, "wrong"),
        ("{2: 1, 1: {3, 4}}", {1: {4, 3}, 2: 1}, "passed"),
        ("{1, 2}", {1.0, 2}, "wrong"),
        ("[1]", (1,), "wrong"),
        ("[]", [1], "wrong"),
        ("[set()]", [set()], "passed"),
        ("float('inf')", float("inf"), "passed"),
        ("[-float('inf'), 1e400]", [-float("inf"), float("inf")], "passed"),
        ("-float('inf')", float("inf"), "wrong"),
        ("{'a': float('nan')}", {"a": float("nan")}, "passed"),
        ("float('nan')", 1.0, "wrong"),
        ("complex(float('nan'), -float('inf'))", complex(float("nan"), -float("inf")), "passed"),
        ("'inf'", float("inf"), "wrong"),
        ("print", 1, "raised"),
        ("(" * 300 + ")" * 300, (), "raised"),
    ],
)
def test_answers_are_plain_values_of_the_right_type(expression, expected, status):
    assert verify(program("", Case(expression, expected)), LIMITS).status == status


@pytest.mark.parametrize("expected", [object(), [{1: (frozenset(),)}], Path("a"), len])
def test_what_no_program_can_say_is_an_error_and_never_a_verdict(expected):
    with pytest.raises(TypeError, match=r"f\(\): no program can say"):
        verify(program("f = lambda: 1", Case("f()", expected)), LIMITS)


def test_a_signal_without_a_name_is_told_by_its_number():
    source = "import os, signal\nf = lambda: os.kill(os.getpid(), signal.SIGRTMIN + 2)"
    verdict = verify(program(source, Case("f()", 3)), LIMITS)
    assert (verdict.status, verdict.detail) == ("killed", f"killed by signal {signal.SIGRTMIN + 2} at f()")


FORGE = """
import os
for fd in range(3, 4096):
    try:
        os.write(fd, b'["value", "2"]\\n' * 9)
    except OSError:
        pass
f = lambda: 3
"""

FLOOD = """
import sys
print("x" * (1 << 28), flush=True)
sys.stderr.write("x" * (1 << 28))
f = lambda: "y" * (1 << 26)
"""


def test_a_program_that_writes_lines_of_its_own_gains_nothing():
    assert verify(program(FORGE, Case("f()", 3)), LIMITS).status == "wrong"
    assert judge([Case("f()", 3)], ["not json", '["value", "3"]'], 0).status == "raised"


def test_a_flood_of_output_is_cut_off():
    assert verify(program(FLOOD, Case("f()", "y")), LIMITS).status in ("killed", "raised")


LEAVE = """
import os, pathlib, time
FOLDER = {folder!r}
def leave():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            pathlib.Path(FOLDER, str(os.getpid())).touch()
            time.sleep(1000)
        os._exit(0)
    while not os.listdir(FOLDER):
        time.sleep(0.01)
leave()
{then}
f = lambda: 3
"""


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("then", "status"),
    [("", "passed"), ("os._exit(3)", "killed"), ("os.abort()", "killed"), ("time.sleep(1000)", "timeout")],
    ids=["answers", "exits", "aborts", "sleeps"],
)
def test_orphans_in_sessions_of_their_own_end_with_the_program(tmp_path, then, status):
    source = LEAVE.format(folder=str(tmp_path), then=then)
    verdict = verify(program(source, Case("f()", 3)), Limits(wall_s=4 if status == "timeout" else 30))
    (left,) = tmp_path.iterdir()
    assert verdict.status == status, verdict
    assert not is_running(int(left.name))


@pytest.mark.hostile
def test_an_orphan_that_was_not_seen_at_first_ends_too(tmp_path, monkeypatch):
    asked, children = set(), psutil.Process.children

    def look(process, recursive=False):
        found = children(process, recursive)
        if process.pid in asked:
            return found
        asked.add(process.pid)
        return [min(found, key=lambda child: child.pid)]  # the program alone

    monkeypatch.setattr(psutil.Process, "children", look)
    source = LEAVE.format(folder=str(tmp_path), then="time.sleep(1000)")
    verdict = verify(program(source, Case("f()", 3)), Limits(wall_s=4))
    (left,) = tmp_path.iterdir()
    assert verdict.status == "timeout", verdict
    assert not is_running(int(left.name))


@pytest.mark.hostile
def test_programs_that_are_verified_at_the_same_time_leave_each_other_alone(tmp_path):
    def one(name):
        folder = tmp_path / name
        folder.mkdir()
        source = LEAVE.format(folder=str(folder), then="")
        return verify(program(source, Case("f()", 3)), LIMITS).status

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, "abcdefgh")) == ["passed"] * 8
    assert not [path for path in tmp_path.glob("*/*") if is_running(int(path.name))]


@pytest.mark.hostile
def test_a_program_that_kills_its_keeper_is_killed_too(tmp_path):
    here = f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()"
    source = f"import os, pathlib\n{here}\nos.kill(os.getppid(), 9)"
    verdict = verify(program(source, Case("1", 1)), LIMITS)
    (left,) = tmp_path.iterdir()
    assert verdict.status == "killed", verdict
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(left.name)).wait(30)


def gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(60)
    return not is_running(pid)


# As if what is looked for first were waited for meanwhile.
LATE = """
import builtins, os
def late(act, error):
    errors = [error]
    def acting(*arguments):
        if errors:
            raise errors.pop()
        return act(*arguments)
    return acting
os.kill, builtins.open = late(os.kill, ProcessLookupError()), late(open, FileNotFoundError())
"""


@pytest.mark.hostile
@pytest.mark.parametrize("before", ["", LATE], ids=["at once", "late"])
@pytest.mark.parametrize("then", ["time.sleep(1000)", "os._exit(0)"], ids=["runs", "has ended"])
def test_a_program_ends_with_whoever_verifies_it_though_that_is_killed(tmp_path, then, before):
    source = f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
    source += LEAVE.format(folder=str(tmp_path / "orphans"), then=then)
    (tmp_path / "orphans").mkdir()
    code = (
        "import sys, threading, time; from sandbox import *; import sandbox\n"
        "sandbox._end = lambda keeper: time.sleep(1000)\n"  # killed before it can end what is left
        f"sandbox._INSIDE = {before!r} + sandbox._INSIDE\n"
        f"one = Submission('a', {source!r}, (Case('1', 1),))\n"
        "threading.Thread(target=verify, args=(one, Limits(wall_s=600, cpu_s=60))).start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=EXAMPLE) as verifier:
        try:
            until = time.monotonic() + 120
            while not list(tmp_path.glob("orphans/*")) or (then == "os._exit(0)" and running(tmp_path) > 1):
                assert time.monotonic() < until, "the program runs"
                time.sleep(0.02)
        finally:
            verifier.kill()
    assert all(gone(pid) for pid in pids_in(tmp_path))


def pids_in(folder):
    return [int(path.name) for path in folder.rglob("*") if path.name.isdecimal()]


def running(folder):
    return sum(map(is_running, pids_in(folder)))


@pytest.mark.hostile
def test_orphans_end_with_the_program_on_the_cluster_too(local_ray, tmp_path):
    source = LEAVE.format(folder=str(tmp_path), then="")
    ray.cloudpickle.register_pickle_by_value(sandbox)
    try:
        (verdict,) = fan_out(verify, [program(source, Case("f()", 3))], timeout_s=60)
        (left,) = tmp_path.iterdir()
        assert verdict.status == "passed", verdict
        assert not is_running(int(left.name))
    finally:
        close_fan_out()
        ray.cloudpickle.unregister_pickle_by_value(sandbox)


def open_files():
    """What is open, but for sockets: those of a Ray come and go."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(link for link in links if not link.startswith(("socket:", "anon_inode:", "/proc/")))


def test_nothing_is_left_running_and_no_descriptor_open():
    submission = Submission("leaves", PROGRAMS["leaves processes behind"], MEDIAN)
    verify(submission, LIMITS)
    own = psutil.Process()
    before, others = open_files(), set(own.children())
    for _ in range(3):
        verify(submission, LIMITS)
    assert open_files() == before
    left = set(own.children()) - others
    assert not [c for c in left if c.status() != psutil.STATUS_ZOMBIE]


def test_the_program_sees_nothing_of_this_process(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "sesame")
    source = "import os\nseen, here = sorted(os.environ), os.listdir()\nleads = os.getpgid(0) == os.getpid()"
    cases = [
        Case("[k for k in seen if k not in ('LANG', 'LC_CTYPE')]", []),
        Case("here", []),
        Case("leads", True),
    ]
    verdict = verify(program(source, *cases), LIMITS)
    assert verdict.status == "passed", verdict


def test_a_run_shows_what_became_of_each_kind_of_program(tmp_path):
    result = tmp_path / "counts.json"
    with subprocess.Popen(
        [sys.executable, EXAMPLE / "run.py", "--count", "30", "--json", result],
        cwd=tmp_path,
        env={**os.environ, "API_TOKEN": "sesame", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        output, _ = run.communicate(timeout=240)
    assert run.returncode == 0
    counts = json.loads(result.read_text())
    # A program that loops reaches its limit of CPU time first, or on a busy machine that of the clock.
    assert counts["loops for ever"].keys() <= {"killed", "timeout"}
    assert {name: list(by_status) for name, by_status in counts.items() if name != "loops for ever"} == {
        name: [status] for name, status in EXPECTED.items() if name != "loops for ever"
    }
    assert sum(sum(by_status.values()) for by_status in counts.values()) == 30
    for name in PROGRAMS:
        assert name in output
    assert "1 submission(s) could not be verified" in output


def test_the_submissions_are_mixed_and_one_has_no_tests():
    submissions = make(101)
    assert sum(s.name == "right" for s in submissions) == 50
    assert {s.name for s in submissions} == {*PROGRAMS, "has no tests"}
    assert [s.name for s in submissions if not s.cases] == ["has no tests"]
