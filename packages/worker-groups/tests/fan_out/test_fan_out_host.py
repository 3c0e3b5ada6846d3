"""The host of one node, in this process and without Ray."""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pickle import loads

import pytest
from patience import PATIENCE_S

from raycrew.worker_groups.fan_out._host import FanOutHost, ForkServer
from raycrew.worker_groups.fan_out._journal import Journal, finished
from raycrew.worker_groups.fan_out._process import dumps


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


def pid_of(report):
    return loads(next(finished(report.journal)).payload)


def test_a_process_that_could_not_be_supervised_is_not_given_to_the_next_batch(host, monkeypatch):
    def where(pause):
        if pause:
            signal.pause()
        return os.getpid()

    function = dumps(where)
    first = pid_of(host.run("one", 1, "where", function, [dumps(False)], None))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(Journal, "current", broken)
        host.run("two", 1, "where", function, [dumps(True)], 0.01)
    report = host.run("three", 1, "where", function, [dumps(False)], None)
    assert report.stop == "done"
    assert pid_of(report) != first
    assert host.statistics()["processes"] == 1


def broken(*_):
    raise RuntimeError("broken")


def refused(*_):
    raise OSError("too many descriptors are on their way")


def test_a_request_that_could_not_be_sent_leaves_the_order_of_the_answers_intact(host, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
        patch.setattr(socket, "send_fds", refused)
        host.run("one", 1, "pid", dumps(pid), [dumps(0)], None)
    with ThreadPoolExecutor(4) as threads:
        reports = [threads.submit(host.run, "two", 4, "pid", dumps(pid), [dumps(i)], None) for i in range(4)]
        assert [report.result(PATIENCE_S).stop for report in reports] == ["done"] * 4


def pid(_):
    return os.getpid()


def test_batches_after_the_death_of_the_fork_server_are_not_lost(host):
    with ThreadPoolExecutor(3) as threads:
        gate = threading.Barrier(3)

        def run(name):
            gate.wait(PATIENCE_S)
            return host.run(name, 3, "pid", dumps(pid), [dumps(0)], None)

        assert [report.stop for report in threads.map(run, "abc")] == ["done"] * 3
        before = list(host._free)
        host._server._process.kill()
        assert all(slot.dead.wait(PATIENCE_S) for slot in before)
        assert [report.stop for report in threads.map(run, "def")] == ["done"] * 3
