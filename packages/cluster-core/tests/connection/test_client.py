"""Through a `ray://` proxy: the connection, virtual clusters, and the same errors as without."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import ray

from raycrew.cluster_core import ClusterUnreachableError, init_ray, lease_ports

HEAD = """
    import sys
    from ray.cluster_utils import Cluster
    options = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 80 << 20}
    options |= {"include_dashboard": False, "ray_client_server_port": int(sys.argv[1])}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    print("ready", flush=True)
    sys.stdin.readline()
"""
DRIVER = """
    import os
    import ray
    from raycrew.cluster_core import RayVirtualCluster, Session, init_ray
    from raycrew.cluster_core.memory import memory_usage

    before = dict(os.environ)
    assert Session.current() is None
    with init_ray(namespace="far") as connection, RayVirtualCluster([2]) as cluster:
        assert init_ray() is connection and connection.namespace == "far" and not connection.started_here
        assert dict(os.environ) == before
        session = Session.current()
        session.check()
        node_id = cluster.bundles[0].node_id
        assert list(connection.run_on_each_node(lambda: os.environ.get("NCCL_DEBUG"))) == [(node_id, "WARN")]
        assert cluster.get_master_address_and_port() != cluster.get_master_address_and_port()
        assert [one.bundle_index for one in memory_usage(cluster)] == [0, 1]
        options = cluster.claim(None, "me").actor_options(1)
        assert ray.get(ray.remote(lambda: 7).options(**options).remote()) == 7
    assert Session.current() is None
    with init_ray():
        assert Session.current() not in (None, session)
    print("done", connection.closed)
"""
WRONG = """
    from raycrew.cluster_core import ClusterAuthenticationError, init_ray
    try:
        init_ray()
    except ClusterAuthenticationError as error:
        print("refused", error.address)
"""


@pytest.fixture(scope="module")
def proxy():
    pytest.importorskip("grpc", reason="Ray's client is not installed")
    with lease_ports(port_range=(23000, 23999)) as lease:
        port = lease.port
    head = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HEAD), str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert any(line == "ready\n" for line in head.stdout)
        wait_until_it_listens(port)
        yield f"ray://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(BrokenPipeError):
            head.communicate("\n", timeout=120)


def wait_until_it_listens(port):
    """The proxy is a process of its own, which comes up after the cluster."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def run(code, env):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.long  # in short: test_proxy, whose server is made up
@pytest.mark.slow
def test_a_driver_behind_a_proxy(proxy):
    assert run(DRIVER, {"RAY_ADDRESS": proxy, "NCCL_DEBUG": "WARN"}) == "done True"


@pytest.mark.long  # in short: test_proxy, whose server is made up
@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("RAY_AUTH_MODE") != "token", reason="the cluster asks for no token")
def test_a_wrong_token_behind_a_proxy(proxy):
    assert run(WRONG, {"RAY_ADDRESS": proxy, "RAY_AUTH_TOKEN": "ab" * 32}) == f"refused {proxy}"


def test_something_else_listens():
    pytest.importorskip("grpc", reason="Ray's client is not installed")
    ray.shutdown()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ClusterUnreachableError, match="proxy"),
    ):
        init_ray(f"ray://127.0.0.1:{server.getsockname()[1]}", timeout_s=2)


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    ray.shutdown()
    monkeypatch.setitem(sys.modules, "grpc", None)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ValueError, match=r"cluster-core\[client\]"),
    ):
        init_ray(f"ray://127.0.0.1:{server.getsockname()[1]}")
