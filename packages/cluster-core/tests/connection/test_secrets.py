"""A secret reaches a worker and shows nowhere in Ray's own state: state API, dashboard, files of the session.

A variable that is forwarded on purpose is searched for too: it proves that the search finds things.
"""

import json
import os
import stat
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ray

from raycrew.cluster_core import init_ray

pytest.importorskip("aiohttp_cors", reason="Ray's dashboard is not installed")

SECRET, NOTE = "s3cr3t-7f1c9a2b44", "n0te-5d0e88c1aa"
PLACES = {"actors", "tasks", "jobs", "runtime_envs", "/api/jobs/"}
DRIVER = """
    import os, sys
    import ray
    from raycrew.cluster_core import init_ray

    class Worker:
        def take(self, secrets):
            os.environ.update(secrets)
            return os.environ["NOTE"], os.environ["MY_API_KEY"]

    with init_ray(forward_env=["NOTE"], secrets=["MY_API_KEY"], namespace="secrets") as connection:
        worker = ray.remote(Worker).options(name="holder", num_cpus=0).remote()
        print(connection, connection.secrets, vars(connection).keys())
        got = ray.get(worker.take.remote(dict(connection.secrets)))
        print("ready", got == (os.environ["NOTE"], os.environ["MY_API_KEY"]), flush=True)
        sys.stdin.readline()
"""


def pages(url):
    """What the dashboard serves, by path; what it says of an error of its own is searched as well."""
    found = {}
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for path in ("/logical/actors", "/api/jobs/", "/nodes?view=summary", "/api/v0/tasks?detail=true"):
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            found[path] = answer.read().decode()
    return found


def listings(url):
    """What `ray list … --detail` says, by kind."""
    from ray.util import state

    kinds = ("actors", "tasks", "workers", "jobs", "runtime_envs", "nodes", "placement_groups", "objects")
    return {
        kind: json.dumps(
            [vars(one) for one in getattr(state, f"list_{kind}")(url, detail=True, limit=1000)], default=str
        )
        for kind in kinds
    }


def session_files(folder):
    """All that Ray wrote down."""
    return {
        str(path): path.read_bytes().decode(errors="replace")
        for path in Path(folder).rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 50_000_000
    }


def shown(state):
    """Where the variable that was forwarded on purpose is found."""
    return {where for where, text in state.items() if NOTE in text}


def complete_state(connection):
    """Everything, once Ray, which reports tasks with some delay, tells all that it is going to."""
    deadline = time.monotonic() + 60
    while True:
        state = {
            **listings(connection.dashboard_url),
            **pages(connection.dashboard_url),
            **session_files(connection.session_dir),
        }
        if shown(state) >= PLACES or time.monotonic() > deadline:
            return state
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.hostile
def test_a_secret_shows_nowhere(tmp_path, short_folder, monkeypatch):
    ray.shutdown()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", short_folder)
    with init_ray("local", num_cpus=2, object_store_memory=80 << 20, dashboard=True) as connection:
        assert connection.dashboard_url.startswith("http://127.0.0.1:")
        closed = Path(short_folder, f"raycrew-{os.getuid()}")  # Ray opens what is in it to everybody
        assert Path(connection.session_dir).is_relative_to(closed)
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700
        driver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER)],
            env={**os.environ, **connection.child_env(), "MY_API_KEY": SECRET, "NOTE": NOTE},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said = []
            for line in driver.stdout:
                said.append(line)
                if line.startswith("ready"):
                    break
            assert said[-1] == "ready True\n", said
            state = complete_state(connection)
        finally:
            driver.communicate("\n", timeout=120)
    assert "holder" in state["actors"] and "holder" in state["/logical/actors"]
    assert shown(state) >= PLACES, "the search does not find things"
    assert [where for where, text in state.items() if SECRET in text] == []
    assert SECRET not in "".join(said)
