"""What was made over one connection to Ray never joins another, nor makes Ray connect by itself."""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raycrew.tensor_transport import RayRefBackend, TransportClosedError, _ray

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.hostile

QUIET = {"stores.close", "directory.close"}
IN_WORDS = {"transport.offer": "not connected to a Ray cluster"}
OF_THE_DIRECTORY = {"directory.ask", "directory.wait"}


def run(script, address, *again):
    """What a script beside this file says, where Ray could connect by itself."""
    command = [sys.executable, str(Path(__file__).with_name(script)), address, *again]
    environ = os.environ | {"RAY_ADDRESS": address}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_after_a_shutdown_every_use_says_so_at_once_and_ray_stays_unconnected(ray_cluster):
    """Of each use: the error, its text, whether Ray connected."""
    ended = run("ended.py", ray_cluster.address)
    assert ended.pop("the user") == ["", "", True], "the user's own code connects by itself as before"
    assert not [name for name, (_, _, joined) in ended.items() if joined]
    assert {name for name, (error, _, _) in ended.items() if not error} == QUIET
    for name, (error, text, _) in ended.items():
        if name in QUIET:
            continue
        kind = "TransportError" if name in IN_WORDS else "TransportClosedError"
        assert error == ("DirectoryLostError" if name in OF_THE_DIRECTORY else kind), (name, text)
        assert IN_WORDS.get(name, "not connected to Ray") in text, name


@pytest.mark.long  # in short: test_a_connection_that_ends_while_ray_is_asked_is_named_whatever_ray_says
@pytest.mark.slow
def test_over_another_connection_what_belongs_to_the_earlier_says_so(ray_cluster):
    again = run("ended.py", ray_cluster.address, "again")
    assert {name for name, (error, _, _) in again.items() if not error} == QUIET
    for name, (error, text, _) in again.items():
        if name not in QUIET:
            kind = "DirectoryLostError" if name in OF_THE_DIRECTORY else "TransportClosedError"
            assert error == kind and "has ended" in text, (name, error, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "again", [pytest.param([], id="ended"), pytest.param(["again"], id="again", marks=pytest.mark.long)]
)
def test_threads_that_wait_for_objects_as_the_connection_ends_say_so(ray_cluster, again):
    found, left, joined = run("waiting.py", ray_cluster.address, *again)
    assert not left and not joined
    assert {name: error for name, (error, _) in found.items()} == {
        "transport.pull": "TransportClosedError",
        "refs.fetch": "TransportClosedError",
    }
    assert all("has ended" in text for _, text in found.values())


def test_a_forked_child_has_no_connection_and_other_threads_have_the_drivers(ray_cluster):
    session, found = _ray.current_session(), []
    thread = threading.Thread(target=lambda: found.append(_ray.Session.current()))
    thread.start()
    thread.join()
    assert found == [session] and _ray.connection_id() == session.id
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _ray.Session.current() is None and not _ray.is_connected() else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_connection_that_ends_while_ray_is_asked_is_named_whatever_ray_says(ray_cluster, monkeypatch):
    session, backend = _ray.current_session(), RayRefBackend()
    seen = iter([session.id])
    monkeypatch.setattr("raycrew.tensor_transport._ray.session.connection_name", lambda: next(seen, None))
    with pytest.raises(TransportClosedError, match="has ended"), session.while_connected():
        ray.get(ray.ObjectRef.from_random(), timeout=0)
    with pytest.raises(TransportClosedError, match="not connected to Ray"):
        backend.put([])


def test_only_the_thread_that_says_so_is_kept_from_connecting(ray_cluster, monkeypatch):
    hook = importlib.import_module("ray._private.auto_init_hook")
    monkeypatch.setattr(hook, "enable_auto_connect", True)
    session, found = _ray.current_session(), []
    with session.while_connected():
        with session.while_connected():
            assert not hook.enable_auto_connect
        assert not hook.enable_auto_connect
        thread = threading.Thread(target=lambda: found.append(bool(hook.enable_auto_connect)))
        thread.start()
        thread.join()
    assert found == [True] and hook.enable_auto_connect
