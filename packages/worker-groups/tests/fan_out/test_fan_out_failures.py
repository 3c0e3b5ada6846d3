import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from patience import eventually, is_running, read_pids

from raycrew.worker_groups import (
    FanOutError,
    FunctionLoadError,
    ItemCrashedError,
    ItemError,
    ItemTimeoutError,
    fan_out,
    fan_out_as_completed,
)
from raycrew.worker_groups._fan_out import hearing

pytestmark = pytest.mark.hostile


def poisonous(folder):
    """Misbehaves on some items; two of them start a child and a daemonised grandchild first."""

    def start_others():
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        script = "setsid sleep 1000 >/dev/null & echo $!"
        made = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
        for pid in (os.getpid(), child.pid, int(made.stdout)):
            pathlib.Path(folder, str(pid)).touch()

    def poison(item):
        if item in (7, 13):
            start_others()
        if item == 3:
            raise KeyError("three")
        if item == 7:
            os._exit(9)
        if item == 11:
            return threading.Lock()
        if item == 13:
            signal.pause()
        if item == 17:
            sys.exit("seventeen")
        if item == 19:
            os.kill(os.getpid(), signal.SIGSEGV)
        return item

    return poison


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_each_poisoned_item_is_reported_by_its_index_takes_what_it_started_along_and_no_other(tmp_path):
    items = [*range(40), threading.Lock()]
    results = fan_out(poisonous(tmp_path), items, batch_size=10, timeout_s=5, on_error="return")
    bad = {i: result for i, result in enumerate(results) if isinstance(result, ItemError)}
    assert [r for i, r in enumerate(results) if i not in bad] == [i for i in range(40) if i not in bad]
    assert {i: type(error) for i, error in bad.items()} == {
        3: ItemError,
        7: ItemCrashedError,
        11: ItemError,
        13: ItemTimeoutError,
        17: ItemError,
        19: ItemCrashedError,
        40: ItemError,
    }
    assert all(error.index == i for i, error in bad.items())
    assert isinstance(bad[3].__cause__, KeyError)
    assert "in poison" in bad[3].__cause__.__notes__[0]
    assert "code 9" in str(bad[7])
    assert "SIGSEGV" in str(bad[19])
    assert isinstance(bad[13], TimeoutError)
    assert "can't be pickled" in str(bad[40])
    pids = read_pids(tmp_path)
    assert len(pids) == 6
    eventually(lambda: not any(map(is_running, pids)), "all processes of the items are gone")


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_failures_raise_one_group_that_holds_the_other_results():
    with pytest.raises(FanOutError) as caught:
        fan_out(lambda i: 1 / i, [1, 0, 2, 0])
    assert caught.value.results == {0: 1.0, 2: 0.5}
    assert [error.index for error in caught.value.exceptions] == [1, 3]
    assert "2 of 4 items failed; first: item 1" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.results == caught.value.results
    assert [error.index for error in again.exceptions] == [1, 3]
    try:
        raise again
    except* ItemError as group:
        assert len(group.exceptions) == 2


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_an_exception_that_does_not_survive_pickling_is_still_told():
    def odd(item):
        raise OddError("very", "odd")

    (result,) = fan_out(odd, [0], on_error="return")
    assert "OddError: very odd" in str(result)
    assert "in odd" in str(result)


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_a_failed_item_is_tried_again_as_often_as_asked(tmp_path):
    def flaky(item):
        tries = tmp_path / f"{item}"
        tries.write_text((tries.read_text() if tries.exists() else "") + ".")
        count = len(tries.read_text())
        if item == 0 and count == 1:
            raise OSError("first time")
        if item == 1 and count == 1:
            os._exit(1)
        if item == 2:
            raise OSError("always")
        return count

    outcomes = sorted(fan_out_as_completed(flaky, range(5), retries=2), key=lambda o: o.index)
    assert [o.value for o in outcomes] == [2, 2, None, 1, 1]
    assert [o.attempts for o in outcomes] == [2, 2, 3, 1, 1]
    assert "after 3 attempts" in str(outcomes[2].error)


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_a_call_that_is_given_up_leaves_nothing_running(tmp_path):
    def note_and_wait(item):
        (tmp_path / str(os.getpid())).touch()
        if item:
            signal.pause()

    outcomes = fan_out_as_completed(note_and_wait, [0, 1, 1], batch_size=1, max_workers=3)
    next(outcomes)
    eventually(lambda: len(read_pids(tmp_path)) >= 2, "another item runs")
    outcomes.close()
    assert fan_out(abs, [-1]) == [1]

    eventually(lambda: sum(map(is_running, read_pids(tmp_path))) <= 1, "the waiting items are killed")


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_items_of_a_lost_host_run_again(tmp_path):
    marker = tmp_path / "killed"

    def kill_host_once(item):
        if item == 5 and not marker.exists():
            marker.touch()
            psutil.Process().parent().parent().parent().kill()  # above the fork server and the keeper
            signal.pause()
        return item

    assert fan_out(kill_host_once, range(40), batch_size=5) == list(range(40))
    assert marker.exists()


@pytest.mark.long  # in short: test_items_of_a_lost_host_run_again
@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_an_item_that_always_brings_its_host_down_is_singled_out():
    def kill_host(item):
        if item == 5:
            psutil.Process().parent().parent().parent().kill()
            signal.pause()
        return item

    results = fan_out(kill_host, range(20), batch_size=5, on_error="return")
    assert isinstance(results[5], ItemCrashedError)
    assert results[:5] + results[6:] == [*range(5), *range(6, 20)]


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_a_dead_fork_server_is_replaced_and_blames_no_item(tmp_path):
    marker = tmp_path / "killed"

    def kill_server_once(item):
        if item == 5 and not marker.exists():
            marker.touch()
            psutil.Process().parent().kill()
            signal.pause()
        return item

    assert fan_out(kill_server_once, range(40), batch_size=5) == list(range(40))


class Unloadable:
    def __call__(self, item):
        return item

    def __reduce__(self):
        return __import__, ("no_such_module_anywhere",)


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_a_function_that_does_not_load_over_there_fails_the_call_at_once():
    with pytest.raises(FunctionLoadError, match="no_such_module_anywhere"):
        fan_out(Unloadable(), range(100))
    assert fan_out(abs, [-1]) == [1]


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_an_item_that_calls_ray_fails_rather_than_become_a_driver():
    (result,) = fan_out(lambda item: ray.put(item), [1], on_error="return")
    assert isinstance(result, ItemError)
    assert "Ray has not been started" in str(result)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(hearing, "LOOK_S", 0.2)
    monkeypatch.setattr(hearing, "SILENT_S", 1.0)


def host_stopper(folder):
    """Stops the host of the process that calls it, which is above its fork server and the keeper of that."""

    def stop_host():
        host = psutil.Process().parent().parent().parent()
        for pid in (os.getpid(), host.pid):
            pathlib.Path(folder, str(pid)).touch()
        host.suspend()

    return stop_host


@pytest.mark.usefixtures("local_ray", "pool", "impatient")
def test_a_stopped_host_is_given_up_where_items_have_a_time_and_leaves_nothing(tmp_path, caplog):
    stop_host = host_stopper(tmp_path)

    def stop_host_once(item):
        if item == 2 and not any(tmp_path.iterdir()):
            stop_host()
            signal.pause()
        return item

    assert fan_out(stop_host_once, range(4), batch_size=1, timeout_s=60) == list(range(4))
    assert "was lost: it has not answered for" in caplog.text
    eventually(lambda: not any(map(is_running, read_pids(tmp_path))), "the host and its item are gone")


@pytest.mark.usefixtures("local_ray", "pool", "impatient")
def test_a_stopped_host_is_waited_for_where_items_may_take_for_ever_and_that_is_said(tmp_path, caplog):
    stop_host = host_stopper(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(fan_out, lambda item: stop_host() or item, [1])
        eventually(lambda: any(map(is_stopped, read_pids(tmp_path))), "the host is stopped")
        since = max(path.stat().st_mtime for path in tmp_path.iterdir())  # a busy one may be silent before
        eventually(lambda: said_since(caplog, since), "it is said")
        assert len(said_since(caplog, since)) == 1 and not call.done()
        for pid in read_pids(tmp_path):
            os.kill(pid, signal.SIGCONT)
        assert call.result() == [1]


def is_stopped(pid):
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def said_since(caplog, since):
    said = "is waited for: it has not answered"
    return [record for record in caplog.records if record.created >= since and said in record.getMessage()]
