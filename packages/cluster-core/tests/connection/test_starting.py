"""Starting Ray where several want it at once, and where there is no home."""

import os
import subprocess
import sys
import tempfile
import textwrap

import pytest

pytestmark = [pytest.mark.hostile, pytest.mark.slow]

THREE = """
    import os, threading
    from concurrent.futures import ThreadPoolExecutor
    import psutil
    from raycrew.cluster_core import init_ray

    together = threading.Barrier(3)

    def start(_):
        together.wait(60)
        return init_ray("local", num_cpus=1, object_store_memory=80 << 20)

    with ThreadPoolExecutor(3) as pool:
        connections = list(pool.map(start, range(3)))
    children = psutil.Process().children(recursive=True)
    print([child.name() for child in children].count("gcs_server"), len({one.address for one in connections}))
    for connection in connections:
        connection.close()
"""

HOMELESS = """
    import pwd, sys

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    pwd.getpwuid = unknown
    from raycrew.cluster_core import ClusterError, init_ray
    from raycrew.cluster_core.__main__ import main

    try:
        init_ray("local", num_cpus=1)
    except ClusterError as error:
        print(error)
    sys.exit(main(["doctor", "--local"]))
"""


def run(code, **changes):
    secret = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "HOME")
    environ = {name: value for name, value in os.environ.items() if name not in secret} | changes
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)


@pytest.mark.long
def test_threads_that_start_together_start_one_cluster():
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = run(THREE, HOME=folder, RAY_TMPDIR=folder)
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_a_user_without_a_home_is_told_what_to_set():
    done = run(HOMELESS)
    assert "no home directory" in done.stdout and "RAY_AUTH_TOKEN_PATH" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr and "Set HOME." in done.stdout
