"""The host of one node, in this process and without Ray."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycrew.worker_groups.fan_out._host import FanOutHost, ForkServer
from raycrew.worker_groups.fan_out._process import dumps

PATIENCE_S = 60


@pytest.fixture
def host():
    host = FanOutHost()
    yield host
    host._server.close()


def test_a_call_given_up_while_its_process_is_forked_does_not_run(host, monkeypatch, tmp_path):
    forking, go_on = threading.Event(), threading.Event()
    fork = ForkServer.fork

    def slow_fork(server):
        forking.set()
        assert go_on.wait(PATIENCE_S)
        return fork(server)

    monkeypatch.setattr(ForkServer, "fork", slow_fork)
    ran = tmp_path / "ran"
    with ThreadPoolExecutor(1) as threads:
        report = threads.submit(host.run, "call", 1, "touch", dumps(lambda _: ran.touch()), [dumps(0)], None)
        assert forking.wait(PATIENCE_S)
        host.cancel("call")
        go_on.set()
        assert report.result(PATIENCE_S).stop == "cancelled"
    assert not ran.exists()
    assert host.run("next", 1, "touch", dumps(lambda _: ran.touch()), [dumps(0)], None).stop == "done"
    assert ran.exists()
    assert host.statistics()["processes"] == 1
