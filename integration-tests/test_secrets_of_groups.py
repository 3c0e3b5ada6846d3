"""Secrets reach the workers of a group, also restarted ones, and show nowhere in Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp_cors", reason="Ray's dashboard is not installed")
pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")


@pytest.mark.long
@pytest.mark.hostile
def test_secrets_of_a_group_show_in_no_state_and_no_log_of_ray():
    values = {"MY_API_KEY": "s3cr3t-1c44d0", "GROUP_TOKEN": "s3cr3t-77ab2e", "NOTE": "n0te-5d0e88"}
    environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | values
    script = Path(__file__).with_name("group_with_secrets.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    arrived, found = json.loads(done.stdout.splitlines()[-1])
    assert arrived, "each worker has all of them"
    assert "actors" in found["NOTE"], "the search finds things"
    assert any("worker-" in place for place in found["NOTE"]), "what workers write is searched, too"
    assert set(found["NOTE"]) >= {
        *("diagnosis", "error", "error, pickled", "pickle", "pickled handle", "timeline", "metrics"),
        *("spans", "raycrew status", "raycrew stacks", "raycrew top", "diagnosis from outside"),
    }, "and what leaves raycrew"
    assert found["MY_API_KEY"] == found["GROUP_TOKEN"] == []
    said = [line for line in (done.stdout + done.stderr).splitlines() if "(Judge pid=" not in line]
    for secret in (values["MY_API_KEY"], values["GROUP_TOKEN"]):
        assert secret not in "".join(said), "but by workers that print it themselves"
