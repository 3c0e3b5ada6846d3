import contextlib
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import (
    FanOutError,
    FunctionLoadError,
    ItemCrashedError,
    ItemError,
    ItemTimeoutError,
    close_fan_out,
    fan_out,
    fan_out_as_completed,
)
from raycrew.worker_groups.fan_out._batches import MAX_BATCH_BYTES, TARGET_S, Backlog, BatchSizer, Entry
from raycrew.worker_groups.fan_out._journal import LOADING, Journal, finished
from raycrew.worker_groups.fan_out._pool import Shares, share_out, shared_pool

CPUS = 8
PATIENCE_S = 60

pytest_plugins = ["raycrew.cluster_core.testing"]


def eventually(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def read_pids(folder):
    return [int(path.name) for path in pathlib.Path(folder).iterdir()]


@pytest.fixture
def pool():
    yield
    close_fan_out()


# Batches, backlog, journal, shares: no Ray


def test_a_batch_takes_about_the_target_time_and_the_last_ones_are_smaller():
    sizer = BatchSizer()
    assert sizer.size(slots=2, remaining=1000) == 1
    for _ in range(10):
        sizer.observe(sizer.size(2, None), sizer.size(2, None) * TARGET_S / 16)
    assert sizer.size(slots=2, remaining=1000) == 16
    assert sizer.size(slots=2, remaining=None) == 16
    assert sizer.size(slots=2, remaining=20) == 5
    assert sizer.size(slots=2, remaining=1) == 1


def test_one_cheap_item_does_not_make_the_next_batch_huge():
    sizer = BatchSizer()
    sizer.observe(1, 1e-9)
    assert sizer.size(1, None) == 4


def test_slow_items_are_sent_one_by_one():
    sizer = BatchSizer(estimate_s=3.0)
    assert sizer.size(1, 100) == 1


def test_a_fixed_size_is_kept():
    sizer = BatchSizer(fixed=7)
    sizer.observe(7, 100.0)
    assert sizer.size(64, 3) == 7


def backlog_of(items, length=None):
    refused = []
    return Backlog(iter(items), pickle.dumps, lambda i, e: refused.append(i), length), refused


def test_an_item_that_does_not_pickle_is_refused_by_its_index():
    backlog, refused = backlog_of([0, lambda: 0, 2])
    assert [entry.index for entry in backlog.take(10)] == [0, 2]
    assert refused == [1]
    assert backlog.remaining == 0


def test_the_source_is_read_as_late_as_possible():
    read = []

    def source():
        for i in range(100):
            read.append(i)
            yield i

    backlog, _ = backlog_of(source())
    backlog.take(3)
    assert read == [0, 1, 2]
    assert backlog.remaining is None


def test_large_items_make_small_batches_and_none_is_lost():
    backlog, _ = backlog_of([b"x" * (MAX_BATCH_BYTES // 2 + 1)] * 3, length=3)
    assert [len(backlog.take(10)) for _ in range(4)] == [1, 1, 1, 0]


def test_what_was_lost_with_its_host_has_no_neighbours_again():
    backlog, _ = backlog_of(range(2, 4), length=2)
    backlog.take(0)
    backlog.send_again([Entry(0, b"", losses=1), Entry(1, b"", losses=1)])
    assert [[e.index for e in backlog.take(10)] for _ in range(3)] == [[0], [1], [0, 1]]


def test_only_what_was_lost_repeatedly_is_suspect():
    backlog, _ = backlog_of(range(2, 3), length=1)
    assert not backlog.next_is_suspect
    backlog.send_again([Entry(0, b"", losses=1), Entry(1, b"", losses=2)])
    assert not backlog.next_is_suspect
    backlog.take(1)
    assert backlog.next_is_suspect


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 200))
def test_every_item_is_taken_once(sizes, length):
    backlog, _ = backlog_of(range(length), length=length)
    taken = []
    for size in sizes * (length + 1):
        batch = backlog.take(size)
        assert len(batch) <= size
        taken += [entry.index for entry in batch]
        assert backlog.remaining == length - len(taken)
        if len(taken) == length:
            break
    assert taken == list(range(length))


def test_a_journal_cut_short_keeps_every_complete_item():
    journal = Journal(os.memfd_create("test"))
    journal.reset()
    assert journal.current()[0] == LOADING
    for position in range(3):
        journal.start(position)
        journal.finish(position != 1, position / 2, b"x" * position)
    data = journal.read()
    assert list(finished(data)) == [(True, 0.0, b""), (False, 0.5, b"x"), (True, 1.0, b"xx")]
    assert len(list(finished(data[:-1]))) == 2
    journal.reset()
    assert journal.read() == b""
    os.close(journal.fd)


@pytest.mark.parametrize(
    ("cpus", "limit", "expected"),
    [
        ({"a": (4.0, 8.0), "b": (1.5, 8.0)}, None, Shares({"a": 4, "b": 1}, True)),
        ({"a": (4.0, 8.0), "b": (0.5, 8.0)}, None, Shares({"a": 4}, True)),
        ({"a": (4.0, 8.0), "b": (4.0, 8.0)}, 3, Shares({"a": 2, "b": 1}, True)),
        ({"a": (4.0, 8.0), "b": (4.0, 8.0)}, 1, Shares({"a": 1}, True)),
        ({"a": (0.0, 8.0), "b": (0.0, 1.0), "c": (0.0, 0.0)}, None, Shares({"a": 8, "b": 1}, False)),
        ({"a": (0.0, 0.0)}, None, Shares({"a": 1}, False)),
    ],
)
def test_processes_are_shared_out_by_free_cpus(cpus, limit, expected):
    assert share_out(cpus, limit) == expected


# Arguments: refused before anything is sent, without Ray even


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"fn": 3}, TypeError, "callable"),
        ({"items": 3}, TypeError, "iterable"),
        ({"items": "abc"}, TypeError, "iterable"),
        ({"items": {"a": 1}}, TypeError, "iterable"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": "many"}, TypeError, "batch_size"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight"),
        ({"max_workers": 1.5}, TypeError, "max_workers"),
        ({"retries": -1}, ValueError, "retries"),
        ({"retries": True}, TypeError, "retries"),
        ({"timeout_s": 0}, ValueError, "timeout_s"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s"),
        ({"timeout_s": "1"}, TypeError, "timeout_s"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        fan_out(**{"fn": abs, "items": [1], **arguments})


async def coroutine(item):
    return item


def generator(item):
    yield item


@pytest.mark.parametrize("fn", [coroutine, generator])
def test_only_plain_functions_are_taken(fn):
    with pytest.raises(TypeError, match="plain function"):
        fan_out(fn, [1])


def test_a_function_that_does_not_pickle_is_refused():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="can't be pickled"):
        fan_out_as_completed(lambda item: lock, [1])


def test_no_items_need_no_cluster():
    assert fan_out(abs, []) == []


def test_without_ray_it_says_so():
    script = "from raycrew.worker_groups import fan_out; fan_out(abs, [1])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "init_ray()" in done.stderr


# With Ray


@pytest.mark.smoke
@pytest.mark.usefixtures("local_ray", "pool")
def test_results_come_in_the_order_of_the_items():
    offset = 10
    assert fan_out(lambda i: i + offset, range(1000)) == list(range(10, 1010))
    assert fan_out(lambda i: i * 2, (i for i in range(50))) == list(range(0, 100, 2))
    assert fan_out(re.compile("a+").fullmatch, []) == []


def poison(item):
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


@pytest.mark.smoke
@pytest.mark.usefixtures("local_ray", "pool")
def test_each_poisoned_item_is_reported_by_its_index_and_the_rest_is_never_lost():
    items = [*range(40), threading.Lock()]
    results = fan_out(poison, items, batch_size=10, timeout_s=2, on_error="return")
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


@pytest.mark.usefixtures("local_ray", "pool")
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


@pytest.mark.usefixtures("local_ray", "pool")
def test_an_exception_that_does_not_survive_pickling_is_still_told():
    def odd(item):
        raise OddError("very", "odd")

    (result,) = fan_out(odd, [0], on_error="return")
    assert "OddError: very odd" in str(result)
    assert "in odd" in str(result)


def with_children(folder):
    """A function that starts a child and a daemonised grandchild, notes all pids, and then does as told."""

    def run(then):
        program = "import os, time; os.setsid(); time.sleep(1000)"
        script = (
            "import subprocess, sys;"
            f"print(subprocess.Popen([sys.executable, '-c', {program!r}], stdout=subprocess.DEVNULL).pid)"
        )
        child = subprocess.Popen([sys.executable, "-c", program])
        made = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
        for pid in (os.getpid(), child.pid, int(made.stdout)):
            pathlib.Path(folder, str(pid)).touch()
        if then == "crash":
            os._exit(1)
        signal.pause()

    return run


@pytest.mark.parametrize("then", ["overrun", "crash"])
@pytest.mark.usefixtures("local_ray", "pool")
def test_an_item_takes_everything_it_started_with_it(tmp_path, then):
    (result,) = fan_out(with_children(tmp_path), [then], timeout_s=10, on_error="return")
    assert isinstance(result, ItemTimeoutError if then == "overrun" else ItemCrashedError)
    pids = read_pids(tmp_path)
    assert len(pids) == 3
    eventually(lambda: not any(map(is_running, pids)), "all processes of the item are gone")


@pytest.mark.usefixtures("local_ray", "pool")
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


@pytest.mark.usefixtures("local_ray", "pool")
def test_outcomes_come_as_they_are_ready(tmp_path):
    gate = tmp_path / "gate"

    def wait_for_gate(item):
        deadline = time.monotonic() + PATIENCE_S
        while item == 0 and not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return item

    outcomes = fan_out_as_completed(wait_for_gate, range(2), batch_size=1)
    assert next(outcomes).result() == 1
    gate.touch()
    assert next(outcomes).result() == 0
    assert list(outcomes) == []


@pytest.mark.usefixtures("local_ray", "pool")
def test_an_endless_source_is_read_only_while_outcomes_are_taken():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield read[-1]

    outcomes = fan_out_as_completed(lambda i: i, endless(), max_in_flight=5, max_workers=2)
    for _ in range(20):
        assert next(outcomes).ok
    outcomes.close()
    assert len(read) <= 20 + 5 + 5


@pytest.mark.usefixtures("local_ray", "pool")
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

    def all_idle():
        return all(psutil.Process(pid).cpu_times() for pid in read_pids(tmp_path) if is_running(pid))

    eventually(lambda: sum(map(is_running, read_pids(tmp_path))) <= 1, "the waiting items are killed")
    assert all_idle()


@pytest.mark.usefixtures("local_ray", "pool")
def test_items_of_a_lost_host_run_again(tmp_path):
    marker = tmp_path / "killed"

    def kill_host_once(item):
        if item == 5 and not marker.exists():
            marker.touch()
            host = psutil.Process().parent().parent()
            host.kill()
            signal.pause()
        return item

    assert fan_out(kill_host_once, range(40), batch_size=5) == list(range(40))
    assert marker.exists()


@pytest.mark.usefixtures("local_ray", "pool")
def test_an_item_that_always_brings_its_host_down_is_singled_out():
    def kill_host(item):
        if item == 5:
            psutil.Process().parent().parent().kill()
            signal.pause()
        return item

    results = fan_out(kill_host, range(20), batch_size=5, on_error="return")
    assert isinstance(results[5], ItemCrashedError)
    assert results[:5] + results[6:] == [*range(5), *range(6, 20)]


@pytest.mark.usefixtures("local_ray", "pool")
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


@pytest.mark.usefixtures("local_ray", "pool")
def test_a_function_that_does_not_load_over_there_fails_the_call_at_once():
    with pytest.raises(FunctionLoadError, match="no_such_module_anywhere"):
        fan_out(Unloadable(), range(100))
    assert fan_out(abs, [-1]) == [1]


@pytest.mark.usefixtures("local_ray", "pool")
def test_the_pool_stays_warm_and_nothing_grows():
    def where(item):
        return os.getpid()

    pids = set(fan_out(where, range(200)))
    own = psutil.Process()

    def census():
        pool = shared_pool()
        (member,) = [pool.member(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        return ray.get(member.handle.statistics.remote()), own.num_fds(), threading.active_count()

    for _ in range(20):
        pids |= set(fan_out(where, range(64)))
    before = census()
    for _ in range(200):
        pids |= set(fan_out(where, range(16)))
    assert len(pids) <= CPUS
    after = census()
    assert after[0]["descriptors"] <= before[0]["descriptors"] + 8
    assert after[0]["processes"] <= CPUS
    assert after[0]["threads"] <= before[0]["threads"] + 8
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 2


@pytest.mark.usefixtures("local_ray", "pool")
def test_kills_leave_no_descriptors_behind():
    pool = shared_pool()

    def descriptors():
        (member,) = [pool.member(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        return ray.get(member.handle.statistics.remote())["descriptors"]

    def leave(item):
        os._exit(1)

    fan_out(leave, range(8), on_error="return")
    before = descriptors()
    fan_out(leave, range(40), on_error="return")
    eventually(lambda: descriptors() <= before + 4, "the descriptors of dead processes are closed")


@pytest.mark.usefixtures("local_ray")
def test_close_ends_every_process_and_the_next_call_starts_anew():
    pids = set(fan_out(lambda i: os.getpid(), range(100)))
    close_fan_out()
    eventually(lambda: not any(map(is_running, pids)), "the pool's processes are gone")
    again = set(fan_out(lambda i: os.getpid(), range(10)))
    assert not pids & again
    close_fan_out()
    close_fan_out()


@pytest.mark.usefixtures("local_ray", "pool")
def test_cpus_are_claimed_while_it_works_and_given_back():
    def free():
        return ray.available_resources().get("CPU", 0)

    eventually(lambda: free() == CPUS, "all CPUs are free")
    gate = threading.Event()

    def items():
        yield 0
        gate.wait(PATIENCE_S)
        yield 1

    outcomes = fan_out_as_completed(lambda i: i, items(), max_workers=3, max_in_flight=1)
    next(outcomes)
    eventually(lambda: free() == CPUS - 3, "three CPUs are claimed")
    gate.set()
    assert [outcome.value for outcome in outcomes] == [1]
    eventually(lambda: free() == CPUS, "the CPUs are given back")


@ray.remote
class Holder:
    def ping(self):
        return None


@pytest.mark.usefixtures("local_ray", "pool")
def test_without_free_cpus_it_works_anyway_and_says_so(caplog):
    holder = Holder.options(num_cpus=CPUS).remote()
    ray.get(holder.ping.remote())
    eventually(lambda: ray.available_resources().get("CPU", 0) == 0, "no CPU is free")
    with caplog.at_level("WARNING", logger="raycrew.worker_groups.fan_out"):
        assert fan_out(abs, range(-10, 0)) == list(range(10, 0, -1))
        assert fan_out(abs, [-1]) == [1]
    assert caplog.text.count("no CPU is free") == 1
    ray.kill(holder)


@pytest.mark.usefixtures("local_ray", "pool")
def test_not_more_processes_than_asked():
    assert len(set(fan_out(lambda i: os.getpid(), range(200), max_workers=1))) == 1


@pytest.mark.usefixtures("local_ray", "pool")
def test_large_functions_items_and_results():
    data = os.urandom(300_000)
    results = fan_out(lambda item: item + data, [bytes([i]) * 2_000_000 for i in range(6)])
    assert [len(r) for r in results] == [2_300_000] * 6
    assert all(r[0] == i and r.endswith(data) for i, r in enumerate(results))


@pytest.mark.usefixtures("local_ray", "pool")
def test_callers_in_several_threads_share_the_pool():
    results = {}

    def call(n):
        results[n] = fan_out(lambda i: (n, i), range(200))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == {n: [(n, i) for i in range(200)] for n in range(4)}


@pytest.mark.usefixtures("local_ray", "pool")
def test_progress_is_shown_where_the_caller_wants_it():
    def half(item):
        return 1 // (item % 2)

    with Progress(disable=True) as progress:
        fan_out(half, range(10), on_error="return", progress=progress)
        (task,) = progress.tasks
    assert (task.completed, task.total) == (10, 10)
    assert "5 failed" in task.description


@pytest.mark.usefixtures("local_ray", "pool")
def test_classes_of_the_caller_come_back_as_themselves():
    class Point:
        def __init__(self, x):
            self.x = x

    (point,) = fan_out(lambda p: type(p)(p.x + 1), [Point(1)])
    assert type(point) is Point
    assert point.x == 2


@pytest.mark.usefixtures("local_ray", "pool")
def test_an_item_that_calls_ray_fails_rather_than_become_a_driver():
    (result,) = fan_out(lambda item: ray.put(item), [1], on_error="return")
    assert isinstance(result, ItemError)
    assert "Ray has not been started" in str(result)


DRIVER = """
import os, sys, ray
from raycrew.worker_groups import fan_out
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(*set(fan_out(lambda i: (os.getpid(), os.getppid()), range(50))), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_the_pool_ends_with_its_driver(local_ray, how):
    run = subprocess.run([sys.executable, "-c", DRIVER, local_ray, how], stdout=subprocess.PIPE, text=True)
    assert run.returncode == (0 if how == "exits" else -signal.SIGKILL)
    pids = {int(pid) for pid in re.findall(r"\d+", run.stdout)}
    assert len(pids) >= 2
    eventually(lambda: not any(map(is_running, pids)), "the processes of the pool are gone")


@pytest.mark.usefixtures("ray_nodes", "pool")
def test_items_are_spread_over_the_nodes():
    def where(item):
        time.sleep(0.05)  # long enough for every node to get its share
        return os.getppid()

    wait_for_all_hosts()
    assert len(set(fan_out(where, range(12), max_workers=3, batch_size=1))) == 3


def wait_for_all_hosts():
    pool = shared_pool()
    ray.get([pool.member(node["NodeID"]).ready for node in ray.nodes() if node["Alive"]], timeout=PATIENCE_S)


@pytest.mark.slow
def test_items_of_a_lost_node_run_on_the_others():
    with simulated_nodes([{"num_cpus": 1}, {"num_cpus": 1}]) as cluster, connected(cluster.address):
        wait_for_all_hosts()
        outcomes = fan_out_as_completed(lambda i: (time.sleep(0.05), i)[1], range(60), batch_size=2)
        values = [next(outcomes).result()]
        (worker,) = cluster.worker_nodes
        cluster.remove_node(worker, allow_graceful=False)
        values += [outcome.result() for outcome in outcomes]
        assert sorted(values) == list(range(60))
        close_fan_out()
