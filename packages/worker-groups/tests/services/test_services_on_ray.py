"""Services on a Ray: endpoints for workers, deaths under load, ends without a trace."""

import importlib
import os
import pickle
import signal
import sys
import sysconfig
import threading
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from asking import ask, is_open, told
from patience import eventually, is_running

pytest.importorskip("uvicorn")

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import EnvironmentProviderError, RayWorkerGroup
from raycrew.worker_groups.services import (
    Proxy,
    Service,
    ServiceClosedError,
    ServiceError,
    ServiceStartError,
    ServiceTimeoutError,
    _asgi,
)

APP = "served_apps:create"
QUICK = {"probe_interval_s": 0.1, "grace_s": 5.0, "ready_timeout_s": 60.0}


class Client:
    """A worker that asks the servers that it was given."""

    def __init__(self, endpoints):
        self.endpoints = endpoints

    def words(self):
        return [told(endpoint, "/where?A")["word"] for endpoint in self.endpoints]


@pytest.fixture
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


def test_workers_are_given_endpoints_and_nothing_is_left_at_the_end(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("RAYCREW_TEST_SECRET", "planted-secret-of-a-test")
    secrets = {"secrets": ["RAYCREW_TEST_SECRET"], "env_vars": {"COLOUR": "red"}}
    monkeypatch.chdir(tmp_path.parent)
    with Service(cluster, APP, replicas=2, cwd=tmp_path.name, **secrets, **QUICK) as service:
        endpoints = service.endpoints
        assert told(endpoints[1], "/where?A")["cwd"] == str(tmp_path)
        assert [one.rank for one in endpoints] == [0, 1]
        assert pickle.loads(pickle.dumps(endpoints)) == endpoints
        assert {one.host for one in endpoints} == {"127.0.0.1"}
        seen = [told(one, "/where?COLOUR,RAYCREW_TEST_SECRET")["env"] for one in endpoints]
        assert seen == [{"COLOUR": "red", "RAYCREW_TEST_SECRET": "planted-secret-of-a-test"}] * 2
        with RayWorkerGroup(cluster, Client, workers_per_node=1, endpoints=endpoints) as clients:
            assert clients.call(Client.words).get_results() == [["made", "made"]]
        states = service.refresh()
        assert [state.status for state in states] == ["ready"] * 2
        assert endpoints[0].token not in f"{service!r} {states!r} {service.logs(0)}"
        assert endpoints[0].token not in _command_lines()
        with pytest.raises(TypeError, match="endpoints"):
            pickle.dumps(service)
    assert not any(is_running(state.pid) for state in states)
    assert not any(is_open(one.port) for one in endpoints)
    assert service.shutdown() is True
    with pytest.raises(ServiceClosedError):
        _ = service.endpoints
    assert len(cluster.holders()) == 0


def _command_lines():
    return " ".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def test_a_service_killed_under_load_answers_what_may_run_twice_and_names_the_rest(cluster, tmp_path):
    """Servers and, at last, a worker are killed; each request is answered, or told as what it is."""
    stop, made = threading.Event(), []

    def load(client):
        told_of = []
        number = 0
        while not stop.is_set():
            number += 1
            name, marked = f"{client}-{number}", number % 2 == 0
            headers = {"Idempotency-Key": name} if marked else {}
            status, answer, body = ask(
                proxy.endpoint, f"/note?{tmp_path},{name}", method="POST", headers=headers, timeout=120
            )
            told_of.append((name, marked, status, answer.get("x-raycrew-outcome"), body))
            made.append(name)
        return told_of

    with (
        Service(cluster, APP, replicas=2, max_restarts=9, **QUICK) as service,
        Proxy(service) as proxy,
        ThreadPoolExecutor(4) as threads,
    ):
        running = [threads.submit(load, client) for client in range(4)]
        try:
            for rank in (0, 1):
                before = service.replicas[rank]
                os.kill(before.pid, signal.SIGKILL)
                await_another(service, before)
            before = service.replicas[0]
            psutil.Process(psutil.Process(before.pid).ppid()).kill()
            await_another(service, before)
            assert not is_running(before.pid)
            eventually(lambda: len(made) > 40, "there was load")
        finally:
            stop.set()
        requests = [one for each in running for one in each.result()]
    noted = Path(tmp_path, "notes").read_text().split()
    for name, marked, status, outcome, body in requests:
        if status == 200:
            assert noted.count(name) >= 1
            assert marked or noted.count(name) == 1
        else:
            assert not marked, (name, status, body)
            assert (status, outcome) in {(502, "perhaps-run"), (503, "surely-not-run")}
            assert noted.count(name) <= (1 if outcome == "perhaps-run" else 0)


def await_another(service, before):
    """Wait until another server of a replica is ready."""

    def is_there():
        now = service.replicas[before.rank]
        return now.status == "ready" and now.pid != before.pid

    eventually(is_there, "another server serves")


def test_a_start_that_fails_says_why_and_leaves_nothing(cluster):
    with pytest.raises(ServiceStartError, match="exit code 1") as caught:
        Service(cluster, "raises_at_import:app", replicas=2, **QUICK)
    assert caught.value.exit_code == 1
    assert "no model is here" in caught.value.log_tail
    assert cluster.holders() == {}
    with pytest.raises(ValueError, match="a bundle each"):
        Service(cluster, APP, replicas=3)
    with pytest.raises(ValueError, match="token_variable="):
        Service(cluster, [sys.executable, "{port}"])
    with pytest.raises(TypeError, match="cluster"):
        Service(APP, APP)
    assert cluster.holders() == {}


class OtherPython:
    """Environments that all are one Python; None for one that can't be had."""

    def __init__(self, python):
        self.python, self.asked = python, []

    def python_for(self, name, runner):
        self.asked.append(name)
        if self.python is None:
            raise FileNotFoundError("no such environment")
        return self.python


def test_an_application_is_served_by_the_python_of_its_environment(cluster, tmp_path):
    venv.create(tmp_path, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path)}))
    (packages / "as_here.pth").write_text("\n".join(filter(None, sys.path)))
    (packages / "only_there.py").write_text(
        "import sys\nfrom served_apps import App\ndef create(): return App(sys.prefix)\n"
    )
    there = OtherPython(str(tmp_path / "bin" / "python"))
    with Service(cluster, "only_there:create", environments=there, **QUICK) as service:
        before = service.replicas[0]
        assert told(before.endpoint, "/where?A")["word"] == str(tmp_path)
        os.kill(before.pid, signal.SIGKILL)
        await_another(service, before)
        assert told(service.endpoints[0], "/where?A")["word"] == str(tmp_path)
    assert there.asked == ["only_there.create"]


def test_an_environment_that_can_not_be_had_is_told_of_by_its_name(cluster):
    with pytest.raises(EnvironmentProviderError, match=r"served_apps\.create"):
        Service(cluster, APP, environments=OtherPython(None))
    with pytest.raises(EnvironmentProviderError, match="scorers"):
        Service(cluster, APP, environments=OtherPython(None), environment="scorers")
    command = [sys.executable, "{port}"]
    with pytest.raises(ValueError, match="environment="):
        Service(cluster, command, token=None, environments=OtherPython(sys.executable))
    with pytest.raises(ValueError, match="environments="):
        Service(cluster, APP, environment="scorers")
    assert cluster.holders() == {}


@pytest.mark.long
def test_a_replica_that_has_failed_for_good_is_told_of(cluster):
    with Service(cluster, APP, max_restarts=0, **QUICK) as service:
        os.kill(service.replicas[0].pid, signal.SIGKILL)
        eventually(lambda: service.replicas[0].status == "failed", "it is given up")
        with pytest.raises(ServiceError, match="exit code -9") as caught:
            service.await_ready(5)
        assert caught.value.exit_code == -9
        assert service.endpoints == ()


@pytest.mark.long
def test_a_replica_whose_worker_is_not_replaced_any_more_is_told_of_at_once(cluster):
    with Service(cluster, APP, replicas=2, max_restarts=0, **QUICK) as service:
        psutil.Process(psutil.Process(service.replicas[1].pid).ppid()).kill()
        with pytest.raises(ServiceError, match=r"replica 1 .* no restarts of its worker are left") as caught:
            service.await_ready(10_000)
        assert not isinstance(caught.value, ServiceTimeoutError)
        assert [one.rank for one in service.endpoints] == [0]


def test_without_the_extra_an_application_is_refused_by_name(cluster, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, _asgi.__name__)
    with pytest.raises(ImportError, match=r"raycrew-worker-groups\[services\]"):
        Service(cluster, APP)
    monkeypatch.undo()
    importlib.import_module(_asgi.__name__)


@pytest.mark.long
def test_on_several_nodes_servers_are_reached_by_their_nodes_addresses(ray_nodes):
    with (
        RayVirtualCluster([1, 1], use_gpus=False) as cluster,
        Service(cluster, APP, replicas=2, **QUICK) as service,
    ):
        address = ray.util.get_node_ip_address()
        assert {one.host for one in service.endpoints} == {address}
        assert told(service.endpoints[1], "/where?A")["word"] == "made"
        with Proxy(service) as proxy:
            assert proxy.endpoint.host == address
            assert told(proxy.endpoint, "/where?A")["word"] == "made"
