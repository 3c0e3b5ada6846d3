"""The script with all checks of a machine with GPUs: what it runs, and what it says of what it did not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu_checks import NOTHING_TO_RUN, Check, checks, missing, run, run_all  # noqa: E402


def test_each_outcome_is_told_with_its_log_and_the_machine(tmp_path):
    chosen = [
        Check("last", ["-c", f"print(open(r'{tmp_path / 'good.log'}').read())"], alone=True),
        Check("good", ["-c", "print('well')"]),
        Check("empty", ["-c", f"raise SystemExit({NOTHING_TO_RUN})"], ends=(0, NOTHING_TO_RUN)),
        Check("bad", ["-c", "raise ValueError('broken')"]),
        Check("large", ["-c", ""], devices=2),
        Check("strange", ["-c", ""], needs=["no_such_module_or_program"]),
    ]
    ended = run_all(chosen, ["a made-up device"], tmp_path, at_once=3)
    assert [one.name for one in ended] == ["good", "empty", "bad", "large", "strange", "last"]
    assert [one.outcome for one in ended] == ["passed", "passed", "failed", "not run", "not run", "passed"]
    written = json.loads((tmp_path / "checks.json").read_text())
    assert written["devices"] == ["a made-up device"]
    assert written["versions"].keys() >= {"python", "ray", "torch"}
    told = {one["name"]: one["last"] for one in written["checks"]}
    assert told["bad"] == "ValueError: broken"
    assert told["large"] == "needs 2 GPU(s), and 1 are here"
    assert told["strange"] == "needs no_such_module_or_program"
    assert (tmp_path / "good.log").read_text() == "well\n"
    assert not (tmp_path / "large.log").exists()


def test_who_does_not_end_is_ended(tmp_path):
    waits = Check("waits", ["-c", "import time; print('on', flush=True); time.sleep(600)"])
    assert run(waits, tmp_path, limit_s=1).outcome == "late"


def test_what_is_run_is_there(tmp_path):
    for check in checks(tmp_path):
        files = [word for word in check.command if word.startswith(str(BENCHMARKS.parent))]
        assert files and all(Path(word).exists() for word in files), check.name
        assert missing(check, 0).startswith(f"needs {check.devices} GPU")
        assert not missing(replace(check, needs=()), check.devices)
    names = [check.name for check in checks(tmp_path)]
    assert len(set(names)) == len(names)


@pytest.mark.long
def test_a_machine_without_devices_says_what_would_run_and_fails():
    told = {"capture_output": True, "text": True, "cwd": BENCHMARKS.parent, "check": False}
    listed = subprocess.run([sys.executable, "benchmarks/gpu_checks.py", "--list"], **told)
    if "would run" in listed.stdout:
        pytest.skip("there are devices here")
    assert listed.returncode == 0
    assert "grpo-two-gpus: needs 2 GPU(s), and 0 are here" in listed.stdout
