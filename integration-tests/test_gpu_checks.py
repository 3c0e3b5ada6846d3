"""The script with all checks of a machine with GPUs: what it runs, and what it says of what it did not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_checks  # noqa: E402
from gpu_checks import (  # noqa: E402
    NOTHING_TO_RUN,
    TELLING,
    Check,
    checks,
    kept,
    missing,
    run,
    run_all,
)


def test_each_outcome_is_told_with_its_log_and_the_machine(tmp_path):
    chosen = [
        Check("last", ["-c", f"print(open(r'{tmp_path / 'good.log'}').read())"], alone=True),
        Check("good", ["-c", "print('well')"]),
        Check("empty", ["-c", f"raise SystemExit({NOTHING_TO_RUN})"], ends=(0, NOTHING_TO_RUN)),
        Check("bad", ["-c", "raise ValueError('broken')"]),
        Check("large", ["-c", ""], devices=2),
        Check("strange", ["-c", ""], needs=["no_such_module_or_program"]),
    ]
    said = []
    ended = run_all(chosen, ["a made-up device"], tmp_path, at_once=3, say=said.append)
    assert ended[-1].name == "last", "alone, after all others"
    outcomes = {one.name: one.outcome for one in ended}
    assert outcomes == dict.fromkeys(["good", "empty", "last"], "passed") | {"bad": "failed"} | dict.fromkeys(
        ["large", "strange"], "not run"
    )
    assert "good: begins" in said and any(line.startswith("bad: failed, ") for line in said)
    written = json.loads((tmp_path / "checks.json").read_text())
    assert written["devices"] == ["a made-up device"]
    assert written["versions"].keys() >= {"python", "ray", "torch"}
    told = {one["name"]: one["last"] for one in written["checks"]}
    assert told["bad"] == "ValueError: broken"
    assert told["large"] == "needs 2 GPU(s), and 1 are here"
    assert told["strange"] == "needs no_such_module_or_program"
    assert (tmp_path / "good.log").read_text() == "well\n"
    assert not (tmp_path / "large.log").exists()


@pytest.mark.parametrize("heeds", [True, False])
def test_who_does_not_end_is_told_to_and_then_ended(tmp_path, monkeypatch, heeds):
    monkeypatch.setattr(gpu_checks, "GRACE_S", 60 if heeds else 0.5)
    words = "import signal, time"
    words += "" if heeds else "; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    words += f"; open(r'{tmp_path / 'on'}', 'w'); time.sleep(600)"

    def say(_):
        raise AssertionError("it has no tests")

    ended = run(Check("waits", ["-c", words]), tmp_path, limit_s=5, say=say)
    assert ended.outcome == "late" and (tmp_path / "on").exists()
    assert ended.last == ("KeyboardInterrupt" if heeds else "")


TESTS = """
import os, pathlib, pytest, signal
HERE = pathlib.Path(__file__).parent

def test_good():
    (HERE / "runs").open("a").write("good ")

def test_bad():
    assert (HERE / "mended").exists(), "it is broken"

@pytest.fixture
def failing():
    yield
    assert (HERE / "mended").exists(), "its end is broken"

def test_ends_badly(failing):
    pass

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass

def test_dies():
    if not (HERE / "mended").exists():
        os.kill(os.getpid(), signal.SIGKILL)

def test_last():
    pass
"""


def test_what_became_of_each_test_is_known_at_once_and_what_passed_is_not_run_again(tmp_path):
    tests, first, second = tmp_path / "test_some.py", tmp_path / "first", tmp_path / "second"
    tests.write_text(TESTS)
    (tmp_path / "test_unread.py").write_text("import no_such_module")
    words = (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests_told",
        "--continue-on-collection-errors",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    )
    check = Check("some", words, path=[TELLING], ends=(0, NOTHING_TO_RUN))
    quick, said = Check("quick", ["-c", ""]), []

    (died, *_) = run_all([check, quick], ["a device"], first, say=said.append)
    assert died.outcome == "failed"
    names = ("good", "bad", "ends_badly", "skipped", "dies")
    told = {name: died.tests[f"test_some.py::test_{name}"] for name in names}
    outcomes = {name: found["outcome"] for name, found in told.items()}
    assert outcomes == {
        "good": "passed",
        "bad": "failed",
        "ends_badly": "failed",
        "skipped": "skipped",
        "dies": "begun",
    }
    assert "it is broken" in told["bad"]["why"] and "its end is broken" in told["ends_badly"]["why"]
    (line,) = [line for line in said if "test_bad" in line]
    assert line.startswith("some: failed test_some.py::test_bad, ") and "it is broken" in line
    assert "it is broken" in (first / "some.log").read_text()

    assert "no_such_module" in died.tests["test_unread.py"]["why"]

    (tmp_path / "test_unread.py").write_text("")
    (first / "some.tests").open("a").write('{"test": "torn')
    (tmp_path / "mended").touch()
    before = kept(first, second, ["some", "quick"], passed=True)
    assert [one.name for one in before] == ["quick"]
    *_, again = run_all([check], ["a device"], second, before=before)
    assert again.outcome == "passed"
    assert {found["outcome"] for found in again.tests.values()} == {"passed", "skipped"}
    assert (tmp_path / "runs").read_text() == "good ", "it was not run again"
    written = json.loads((second / "checks.json").read_text())["checks"]
    assert {one["name"]: one["outcome"] for one in written} == {"quick": "passed", "some": "passed"}
    assert kept(second, second, ["quick"], passed=False)[0].tests == again.tests


def test_what_no_time_is_left_for_is_not_begun(tmp_path):
    (ended,) = run_all([Check("late", ["-c", ""])], ["a device"], tmp_path, within_s=1)
    assert (ended.outcome, ended.last) == ("not run", "no time is left")


def test_what_is_run_is_there(tmp_path):
    for check in checks(tmp_path):
        files = [word for word in check.command if word.startswith(str(BENCHMARKS.parent))]
        assert files and all(Path(word).exists() for word in files), check.name
        assert missing(check, 0).startswith(f"needs {check.devices} GPU")
        assert not missing(replace(check, needs=()), check.devices)
    names = [check.name for check in checks(tmp_path)]
    assert len(set(names)) == len(names)


def test_names_choose_and_a_run_goes_on_where_the_one_before_ended(tmp_path, monkeypatch, capsys):
    note = f"import os; open(r'{tmp_path / 'runs'}', 'a').write('{{}} '); assert {{}}"
    is_mended = f"os.path.exists(r'{tmp_path / 'mended'}')"
    known = [
        Check("good", ["-c", note.format("good", True)]),
        Check("bad", ["-c", note.format("bad", is_mended)]),
    ]
    monkeypatch.setattr(gpu_checks, "checks", lambda output: known)
    monkeypatch.setattr(gpu_checks, "device_names", lambda: ["a device"])

    def outcomes(*words):
        monkeypatch.setattr(sys, "argv", ["gpu_checks.py", *words, "--output", str(tmp_path / "results")])
        status = gpu_checks.main()
        written = json.loads((tmp_path / "results/checks.json").read_text())["checks"]
        return status, {one["name"]: one["outcome"] for one in written}

    half = {"good": "passed", "bad": "failed"}
    assert outcomes() == (1, half)
    assert outcomes("bad") == (1, half), "what is known of others stays"
    (tmp_path / "mended").touch()
    assert outcomes("--resume") == (0, {"good": "passed", "bad": "passed"})
    assert outcomes("--resume", str(tmp_path / "results"))[0] == 0
    assert sorted((tmp_path / "runs").read_text().split()) == ["bad", "bad", "bad", "good"]
    with pytest.raises(SystemExit):
        outcomes("--resume", "good")
    assert "good is no folder of results: names of checks come before" in capsys.readouterr().err


def test_a_check_that_nobody_knows_is_refused_by_name():
    command = [sys.executable, str(BENCHMARKS / "gpu_checks.py"), "tests-nccl", "strange"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2 and "no such check: strange; there are tests-transport, " in told.stderr


@pytest.mark.long
def test_a_machine_without_devices_says_what_would_run_and_fails():
    told = {"capture_output": True, "text": True, "cwd": BENCHMARKS.parent, "check": False}
    listed = subprocess.run([sys.executable, "benchmarks/gpu_checks.py", "--list"], **told)
    if "would run" in listed.stdout:
        pytest.skip("there are devices here")
    assert listed.returncode == 0
    assert "grpo-two-gpus: needs 2 GPU(s), and 0 are here" in listed.stdout
