"""`raycrew run` on Ray: what it runs joins, and a cluster lives for as long as it should."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import ray
from commanding import eventually, python

from raycrew.cluster_core import init_ray

RUN = [sys.executable, "-m", "raycrew.cluster_core", "run"]
JOIN = python("""
    from raycrew.cluster_core import init_ray
    with init_ray() as connection:
        print(connection.address, connection.started_here, connection.why, sep="|")
""")
PLAIN = python("""
    import ray
    ray.init()
    import os, sys
    named = ray.get(ray.remote(lambda: os.environ.get("RAY_ADDRESS")).remote())
    print(ray.get_runtime_context().gcs_address, ray.cluster_resources()["CPU"], named, sep="|", flush=True)
    sys.stdin.readline()
""")


@pytest.fixture
def environ():
    """An environment that names neither a cluster nor a token, with a folder for sessions of its own."""
    named = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "SLURM_JOB_ID")
    kept = {name: value for name, value in os.environ.items() if name not in named}
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield {**kept, "RAY_TMPDIR": folder, "HOME": folder, "CUDA_VISIBLE_DEVICES": ""}


def run(*arguments, env):
    return subprocess.run(
        [*RUN, *arguments], env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_run_within_a_run_joins_its_cluster_with_its_token(local_ray_session, environ, tmp_path):
    spelled = f"localhost:{local_ray_session.rpartition(':')[2]}"
    (tmp_path / "env.yaml").write_text(f"ray_head_node_address: {spelled}\napi_key: hush\n")
    done = run("--env-file", str(tmp_path / "env.yaml"), "--", *RUN, "--", *JOIN, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{local_ray_session}|False|RAY_ADDRESS names it"
    first, second = (line for line in done.stderr.splitlines() if line.startswith("raycrew run:"))
    assert f"joined the cluster at {local_ray_session}, which stays (ray_head_node_address in " in first
    assert second.endswith("which stays (the raycrew run around this one has it)")
    for secret in ("hush", os.environ.get("RAY_AUTH_TOKEN", "hush")):
        assert secret not in done.stdout + done.stderr
    ray.shutdown()
    with init_ray(local_ray_session):
        pass  # It is still there.


@pytest.mark.hostile
@pytest.mark.long
def test_a_wrong_token_and_an_address_that_does_not_answer(local_ray_session, environ):
    wrong = {**environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    done = run("--address", local_ray_session, "--", "touch", f"{environ['HOME']}/ran", env=wrong)
    assert done.returncode == 125 and "token" in done.stderr and "ab" * 32 not in done.stderr
    done = run("--timeout", "2", "--address", "192.0.2.1:6379", "--", "true", env=environ)
    assert done.returncode == 125 and "192.0.2.1:6379" in done.stderr
    done = run("--num-cpus", "2", "--address", local_ray_session, "--", "true", env=environ)
    assert done.returncode == 125 and "num_cpus can't be given for a running cluster" in done.stderr
    done = run("--address", "auto", "--", "true", env={**environ, "RAY_TMPDIR": "/tmp"})
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_that_was_started_ends_with_the_command_however_it_ends(number, environ):
    settings = ["--address", "local", "--num-cpus", "3", f"object_store_memory={80 << 20}"]
    environ |= {
        "RAY_ADDRESS": "192.0.2.1:6379",
        "RAYCREW_RUN_ADDRESS": "192.0.2.1:6379",
    }  # As within another.
    process = subprocess.Popen(
        [*RUN, *settings, "--", *PLAIN], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address, cpus, named = process.stdout.readline().strip().split("|")
    nodes = [
        one for one in psutil.process_iter(["cmdline"])
        if one.info["cmdline"] and f"--gcs-address={address}" in one.info["cmdline"]
    ]  # fmt: skip
    assert float(cpus) == 3 and nodes and named in ("None", address)
    token = Path(environ["HOME"], ".ray", "auth_token")
    assert token.stat().st_mode & 0o777 == 0o600
    if number is None:
        process.communicate("\n", timeout=240)
        assert process.returncode == 0
    else:
        process.send_signal(number)
        process.wait(240)  # Its input stays open: the end of that would end the command, too.
        process.communicate(timeout=240)
        # Ray has a driver that gets a SIGTERM exit with its number, and that is the command's code.
        assert process.returncode == (-number if number == signal.SIGKILL else int(number))
    eventually(lambda: not any(one.is_running() for one in nodes))
