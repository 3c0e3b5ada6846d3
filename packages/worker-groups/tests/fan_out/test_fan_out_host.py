"""The host of one node, in this process and without Ray."""

import itertools
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pickle import loads

import psutil
import pytest
from patience import PATIENCE_S, is_running

from raycrew.worker_groups._fan_out.processes import process as _process
from raycrew.worker_groups._fan_out.processes import slots as _slots
from raycrew.worker_groups._fan_out.processes import supervision as _supervision
from raycrew.worker_groups._fan_out.processes.code import dumps
from raycrew.worker_groups._fan_out.processes.host import FanOutHost
from raycrew.worker_groups._fan_out.processes.journal import Journal, Stamp, finished
from raycrew.worker_groups._fan_out.processes.slots import ForkServer

NUMBERS = itertools.count(1)


def run(host, call_id, limit, key, function, item, timeout_s=None):
    """One batch of one item."""
    return host.run(call_id, limit, next(NUMBERS), (key, None), function, None, [dumps(item)], timeout_s, {})


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
        report = threads.submit(run, host, "call", 1, "touch", dumps(lambda _: ran.touch()), 0)
        assert forking.wait(PATIENCE_S)
        host.cancel("call")
        go_on.set()
        assert report.result(PATIENCE_S).stop == "cancelled"
    assert not ran.exists()
    assert run(host, "next", 1, "touch", dumps(lambda _: ran.touch()), 0).stop == "done"
    assert ran.exists()
    assert host.statistics()["processes"] == 1


def pid_of(report):
    return loads(next(finished(report.journal, report.stamp)).payload)


def test_a_process_that_could_not_be_supervised_is_not_given_to_the_next_batch(host, monkeypatch):
    def where(pause):
        if pause:
            signal.pause()
        return os.getpid()

    function = dumps(where)
    first = pid_of(run(host, "one", 1, "where", function, False))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(Journal, "head", broken)
        run(host, "two", 1, "where", function, True, 0.01)
    report = run(host, "three", 1, "where", function, False)
    assert report.stop == "done"
    assert pid_of(report) != first
    assert host.statistics()["processes"] == 1


def broken(*_):
    raise RuntimeError("broken")


def test_code_and_secrets_go_to_a_process_once(host, monkeypatch):
    sizes, message = [], _slots.Slot.message

    def measured(slot, *args):
        made = message(slot, *args)
        sizes.append(len(made))
        return made

    monkeypatch.setattr(_slots.Slot, "message", measured)
    load, function = dumps(lambda large=bytes(10**6): len(large)), dumps(lambda name: os.environ.get(name))
    secrets, seen = {"API_KEY": "hush" * 10_000}, []
    for batch, told in enumerate([secrets, secrets, {**secrets, "API_KEY": "changed"}], start=1):
        report = host.run("call", 1, batch, ("f", "load"), function, load, [dumps("API_KEY")], None, told)
        seen.append(loads(next(finished(report.journal, report.stamp)).payload))
    assert seen == [secrets["API_KEY"], secrets["API_KEY"], "changed"]
    assert sizes[0] > 10**6 + 40_000
    assert max(sizes[1:]) < 1000


@pytest.mark.hostile
def test_secrets_that_an_item_changes_or_removes_are_put_back_for_the_next(host):
    def change(how):
        found = os.environ.get("API_KEY"), os.environ.get("OTHER")
        if how == "remove":
            del os.environ["API_KEY"]
        elif how == "clear":
            os.environ.clear()
        else:
            os.environ["API_KEY"] = os.environ["OTHER"] = how
        return found

    def initializer():
        os.environ["OTHER"] = "set by the initializer"

    items = [dumps(how) for how in ("remove", "overwritten", "clear", "overwritten")]
    code, first = dumps(change), dumps(initializer)
    for batch in (1, 2):
        told = {"API_KEY": "hush", "OTHER": "loud"}
        report = host.run("call", 1, batch, ("change", "first"), code, first, items, None, told)
        seen = [loads(end.payload) for end in finished(report.journal, report.stamp)]
        assert seen == [("hush", "set by the initializer")] * 4


def refused(*_):
    raise OSError("too many descriptors are on their way")


def test_a_request_that_could_not_be_sent_leaves_the_order_of_the_answers_intact(host, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
        patch.setattr(socket, "send_fds", refused)
        run(host, "one", 1, "pid", dumps(pid), 0)
    with ThreadPoolExecutor(4) as threads:
        reports = [threads.submit(run, host, "two", 4, "pid", dumps(pid), i) for i in range(4)]
        assert [report.result(PATIENCE_S).stop for report in reports] == ["done"] * 4


def pid(_):
    return os.getpid()


@pytest.mark.long  # in short: test_a_dead_fork_server_is_replaced_and_blames_no_item
def test_batches_after_the_death_of_the_fork_server_are_not_lost(host):
    with ThreadPoolExecutor(3) as threads:
        gate = threading.Barrier(3)

        def run_at_once(name):
            gate.wait(PATIENCE_S)
            return run(host, name, 3, "pid", dumps(pid), 0)

        assert [report.stop for report in threads.map(run_at_once, "abc")] == ["done"] * 3
        before = list(host._free)
        host._server._process.kill()
        assert all(slot.dead.wait(PATIENCE_S) for slot in before)
        assert [report.stop for report in threads.map(run_at_once, "def")] == ["done"] * 3


def stop(item):
    os.kill(os.getpid(), signal.SIGSTOP)
    return item


@pytest.mark.hostile
def test_a_deadline_needs_nothing_from_the_process(host, monkeypatch):
    monkeypatch.setattr(_supervision, "ACCEPT_TIMEOUT_S", 86_400.0)
    report = run(host, "one", 1, "stop", dumps(stop), 0, 0.1)
    assert (report.stop, report.detail) == ("timeout", "was killed by SIGKILL")
    assert host.statistics()["processes"] == 0


@pytest.mark.hostile
def test_a_process_that_does_not_take_its_batch_is_deaf_and_blames_nobody(host, monkeypatch):
    assert run(host, "one", 1, "pid", dumps(pid), 0).stop == "done"
    (slot,) = host._free
    signal.pidfd_send_signal(slot.pidfd, signal.SIGSTOP)
    monkeypatch.setattr(_supervision, "ACCEPT_TIMEOUT_S", 0.1)
    for size in (10, 1_000_000):  # it stays in the socket, or does not fit
        report = run(host, "two", 1, "pid", dumps(pid), b"x" * size)
        assert (report.stop, report.journal) == ("lost", b"")
        assert host.statistics()["processes"] == 0
        monkeypatch.undo()
        assert run(host, "three", 1, "pid", dumps(pid), 0).stop == "done"
        (slot,) = host._free
        signal.pidfd_send_signal(slot.pidfd, signal.SIGSTOP)
        monkeypatch.setattr(_supervision, "ACCEPT_TIMEOUT_S", 0.1)


@pytest.mark.hostile
def test_a_process_that_speaks_unasked_is_not_used_again(host):
    first = pid_of(run(host, "one", 1, "pid", dumps(pid), 0))
    (slot,) = host._free
    slot.connection.shutdown(socket.SHUT_RD)
    report = run(host, "two", 1, "pid", dumps(pid), 0)
    assert report.stop == "done"
    assert pid_of(report) != first


FORGERIES = {
    "another slot": lambda stamp: stamp._replace(slot=stamp.slot + 1),
    "another batch": lambda stamp: stamp._replace(batch=stamp.batch - 1),
    "another process": lambda stamp: stamp._replace(pid=1),
}


@pytest.mark.hostile
@pytest.mark.parametrize(
    "whose",
    [
        pytest.param("another slot", marks=pytest.mark.long),
        pytest.param("another batch", marks=pytest.mark.long),
        "another process",
    ],
)
def test_an_answer_that_does_not_fit_ends_the_process_and_reaches_no_report(host, whose, monkeypatch):
    receive, pids = _supervision._receive, []

    def forged(slot):
        pids.append(slot.pid)
        kind, *who = _process.ANSWER.unpack(receive(slot))
        return _process.ANSWER.pack(kind, *FORGERIES[whose](Stamp(*who)))

    monkeypatch.setattr(_supervision, "_receive", forged)
    report = run(host, "one", 1, "pid", dumps(pid), 0)
    assert (report.stop, report.journal, report.stamp) == ("lost", b"", None)
    assert not is_running(pids[0])
    assert host.statistics()["processes"] == 0


@pytest.mark.hostile
def test_an_answer_before_all_items_have_ended_reaches_no_report(host, monkeypatch):
    monkeypatch.setattr(Journal, "read", lambda _: b"")
    assert run(host, "one", 1, "pid", dumps(pid), 0).stop == "lost"


@pytest.mark.hostile
def test_a_kill_between_two_lines_of_the_journal_blames_the_item_that_ran(host):
    def kill(item):
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    items = [dumps(item) for item in range(4)]
    report = host.run("one", 1, 1, ("kill", None), dumps(kill), None, items, None, {})
    assert (report.stop, report.detail) == ("crash", "was killed by SIGKILL")
    assert [loads(end.payload) for end in finished(report.journal, report.stamp)] == [0, 1]


@pytest.mark.hostile
@pytest.mark.parametrize("who", ["fork server", pytest.param("keeper", marks=pytest.mark.long)])
def test_a_stopped_server_does_not_keep_the_host_from_closing(host, monkeypatch, who):
    assert run(host, "one", 1, "pid", dumps(pid), 0).stop == "done"
    monkeypatch.setattr(_slots, "END_TIMEOUT_S", 1.0)
    keeper = psutil.Process(host._server._process.pid)
    (server,) = keeper.children()
    everything = [keeper, server, *server.children(recursive=True)]
    (server if who == "fork server" else keeper).suspend()
    host.close()
    assert not any(is_running(process.pid) for process in everything)
    assert run(host, "two", 1, "pid", dumps(pid), 0).stop == "lost"


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, "signal 35")]
)
def test_an_item_that_ends_its_process_by_any_signal_is_to_blame(host, number, name):
    report = run(host, "call", 1, "die", dumps(lambda number: os.kill(os.getpid(), number)), int(number))
    assert (report.stop, report.detail) == ("crash", f"was killed by {name}")
