"""How the command line finds a cluster of this user, and presents its token."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import ray

from raycrew.cluster_core import NoClusterError
from raycrew.cluster_core._connection.discovery import RunningCluster
from raycrew.cluster_core._connection.visiting import prepare_visit, present_token

pytestmark = pytest.mark.hostile

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/home/me/.ray/auth_token"}
PLAIN = RunningCluster("10.0.0.1:1000", {"raycrew.devices": "none"}, authentication=TOKEN)
OTHER = RunningCluster("10.0.0.1:2000", {"raycrew.devices": "0"})


@pytest.fixture(autouse=True)
def apart():
    ray.shutdown()


@pytest.mark.parametrize("address", ["auto", PLAIN.address])
def test_the_only_cluster_is_found_and_its_token_presented(address, tmp_path):
    environ = {"RAY_TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    assert prepare_visit(address, environ, lambda: [PLAIN]) == PLAIN.address
    assert environ.items() >= TOKEN.items()


def test_a_token_that_is_named_stays(tmp_path):
    environ = {"RAY_TMPDIR": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    assert prepare_visit("auto", environ, lambda: [PLAIN]) == PLAIN.address
    assert environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN_PATH" not in environ


def test_a_token_goes_to_no_cluster_but_its_own(tmp_path):
    environ = {"RAY_TMPDIR": str(tmp_path)}
    assert prepare_visit("192.0.2.1:6379", environ, lambda: [PLAIN]) == "192.0.2.1:6379"
    assert prepare_visit("auto", {**environ, "RAY_ADDRESS": OTHER.address}, lambda: [PLAIN, OTHER])
    assert prepare_visit("auto", environ, list) == "auto"
    assert environ == {"RAY_TMPDIR": str(tmp_path)}


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]", "0.0.0.0", socket.gethostname()]
)
def test_the_token_of_a_cluster_here_is_presented_however_it_is_spelled(host, tmp_path):
    mine = replace(PLAIN, address="127.0.0.1:1000")
    environ = {"RAY_TMPDIR": str(tmp_path)}
    if host == socket.gethostname():  # which the machine may have as the name of its network's interface
        mine = replace(mine, address=f"{socket.gethostbyname(host)}:1000")
    assert prepare_visit(f"{host}:1000", environ, lambda: [OTHER, mine]) == mine.address
    assert environ.items() >= TOKEN.items()
    assert present_token(f"{host}:1000", {}, lambda: [OTHER, mine]) == mine.address
    for port in (999, 2000):
        unknown = f"{host}:{port}"
        assert present_token(unknown, environ := {}, lambda: [OTHER, mine]) == unknown and environ == {}


def test_the_spelling_of_a_cluster_goes_before_what_it_leads_to():
    first, second = replace(PLAIN, address="127.0.0.1:1000"), replace(PLAIN, address="localhost:1000")
    for one in (first, second):
        assert present_token(one.address, {}, lambda: [first, second]) == one.address


def test_several_clusters_are_named_unless_one_is_for_these_devices(tmp_path):
    environ = {"RAY_TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(NoClusterError, match=r"10\.0\.0\.1:1000, 10\.0\.0\.1:2000; name one"):
        prepare_visit("auto", environ, lambda: [PLAIN, OTHER])
    assert prepare_visit("auto", {**environ, "CUDA_VISIBLE_DEVICES": "0"}, lambda: [PLAIN, OTHER])


DRIVER = """
    import sys
    from raycrew.cluster_core import init_ray
    with init_ray("local", num_cpus=1, object_store_memory=80 << 20) as connection:
        print("ready", connection.address, flush=True)
        sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["doctor"], id="doctor"),
        pytest.param(["status", "grid"], id="status and grid", marks=pytest.mark.long),
    ],
)
def test_the_commands_see_a_cluster_that_a_plain_driver_started(short_folder, names):
    """Without devices, without a token in anybody's environment, from another terminal."""
    secret = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    environ = {name: value for name, value in os.environ.items() if name not in secret}
    environ |= {"HOME": short_folder, "RAY_TMPDIR": short_folder, "CUDA_VISIBLE_DEVICES": ""}
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "raycrew.cluster_core", *arguments],
            env=environ, capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    try:
        address = next(line.split()[1] for line in driver.stdout if line.startswith("ready"))
        for name in names:
            done = command(name, "--json", "--address", address)
            assert done.returncode in (0, 1) and json.loads(done.stdout) is not None, done.stderr
            assert name != "doctor" or address in done.stdout
        found = command("status", "--json")  # Others may run here.
        assert address in found.stdout + found.stderr.replace("\n", "")
    finally:
        driver.communicate("\n", timeout=120)
