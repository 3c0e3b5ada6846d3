import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from patience import PATIENCE_S, eventually, is_running
from ray.util.placement_group import placement_group_table

from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import close_fan_out, fan_out, fan_out_as_completed
from raycrew.worker_groups._fan_out.warm_pool import pool as pooling
from raycrew.worker_groups._fan_out.warm_pool.pool import Pool, shared_pool
from raycrew.worker_groups._ray.nodes import node_cpus

CPUS = 8


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
    for _ in range(60):
        pids |= set(fan_out(where, range(16)))
    assert len(pids) <= CPUS
    after, rays = census(), 30  # which come and go; one more for each call would be twice as many
    assert after[0]["descriptors"] <= before[0]["descriptors"] + rays
    assert after[0]["processes"] <= CPUS
    assert after[0]["threads"] <= before[0]["threads"] + rays
    assert after[1] <= before[1] + rays
    assert after[2] <= before[2] + rays


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


@pytest.mark.usefixtures("local_ray", "pool")
def test_short_calls_one_after_the_other_get_every_cpu_and_leave_no_claim():
    """Ray may be about to grant a claim when a call ends, and counts a removed one for a while longer."""
    pool = shared_pool()
    (node,) = [node["NodeID"] for node in ray.nodes()]
    eventually(lambda: node_cpus()[node][0] == CPUS, "all CPUs are free")
    for _ in range(30):
        with pool.session(None) as slots:
            assert slots == {node: CPUS}
    assert fan_out(abs, [-1]) == [1]
    eventually(lambda: ray.available_resources().get("CPU", 0) == CPUS, "the CPUs are given back")
    assert {claim["state"] for claim in placement_group_table().values()} <= {"REMOVED"}


class LateRay:
    """Ray's account of one node's eight CPUs, which counts a removed claim for some looks longer.

    Args:
        answers: What Ray says of each claim, look by look: granted, refused, or undecided.
        looks_late: How many looks at free CPUs a removed claim still counts for.
    """

    def __init__(self, monkeypatch, answers, looks_late=0):
        self.answers = answers
        self.looks_late = looks_late
        self.looks_left = 0
        self.others = 0.0
        self.calls = []
        monkeypatch.setattr(pooling._ray, "claim_cpus", self.claim)
        monkeypatch.setattr(pooling._ray, "give_back", self.remove)
        monkeypatch.setattr(pooling._ray, "connection", lambda: "me")
        monkeypatch.setattr(pooling._ray, "is_granted", lambda claim: next(claim))
        monkeypatch.setattr(pooling._ray, "node_cpus", self.cpus)

    def claim(self, cpus):
        self.calls.append(list(cpus))
        return iter(self.answers)

    def remove(self, claim):
        assert not list(claim), "removed while undecided"
        self.looks_left = self.looks_late

    def cpus(self):
        self.looks_left -= 1
        return {"node": (0.0 if self.looks_left >= 0 else CPUS - self.others, float(CPUS))}


@pytest.mark.parametrize("answers", [[True], [None, None, True], [False], [None, False]])
def test_our_own_last_claim_is_not_taken_for_somebody_elses(monkeypatch, answers):
    late = LateRay(monkeypatch, answers, looks_late=3)
    pool = Pool("me")
    for _ in range(3):
        with pool.session(None) as slots:
            assert slots == {"node": CPUS}
    assert late.calls == [[float(CPUS)]] * 3


def test_a_claim_that_was_not_granted_does_not_count_as_ours(monkeypatch):
    late = LateRay(monkeypatch, [None, False])
    pool = Pool("me")
    with pool.session(None) as slots:
        assert slots == {"node": CPUS}
    late.others = 6.0  # they were quicker
    with pool.session(None) as slots:
        assert slots == {"node": 2}
    assert late.calls == [[8.0], [2.0]]


@pytest.mark.usefixtures("local_ray", "pool")
def test_a_call_that_is_given_up_ends_even_when_every_thread_of_the_host_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(pooling, "MAX_HOST_THREADS", 3)
    go_on = tmp_path / "go on"

    def hold(item):
        (tmp_path / f"{item}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not go_on.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return item

    given_up = fan_out_as_completed(hold, ["quick", "a", "b"], batch_size=1, max_workers=2)
    go_on.touch()
    next(given_up)
    go_on.unlink()
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(fan_out, abs, [-i], batch_size=1) for i in range(4)]
        given_up.close()
        assert [other.result(PATIENCE_S) for other in others] == [[0], [1], [2], [3]]


def test_cpus_that_ray_frees_late_are_claimed_then_without_a_warning(monkeypatch, caplog):
    """As those of finished tasks are, whose lease Ray keeps for a while."""
    late = LateRay(monkeypatch, [True])
    monkeypatch.setattr(pooling, "LEASE_S", 0.0)
    pool, late.others = Pool("me"), float(CPUS)
    with pool.session(None) as slots:
        assert (slots, late.calls) == ({"node": CPUS}, [])
        late.others = 0.0
        pool.look_again()
        pool.look_again()
    assert late.calls == [[float(CPUS)]]
    assert not caplog.records


@ray.remote
class Holder:
    def ping(self):
        return None


@pytest.mark.usefixtures("local_ray", "pool")
def test_without_free_cpus_it_works_anyway_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(pooling, "LEASE_S", 0.0)
    holder = Holder.options(num_cpus=CPUS).remote()
    ray.get(holder.ping.remote())
    eventually(lambda: ray.available_resources().get("CPU", 0) == 0, "no CPU is free")
    with caplog.at_level("WARNING", logger="raycrew.worker_groups._fan_out"):
        assert fan_out(abs, range(-10, 0)) == list(range(10, 0, -1))
        assert fan_out(abs, [-1]) == [1]
    assert caplog.text.count("no CPU is free") == 1
    ray.kill(holder)


@pytest.mark.usefixtures("local_ray", "pool")
def test_not_more_processes_than_asked():
    assert len(set(fan_out(lambda i: os.getpid(), range(200), max_workers=1))) == 1


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


DRIVER = """
import os, sys, ray
from raycrew.worker_groups import fan_out
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(*set(fan_out(lambda i: (os.getpid(), os.getppid()), range(50))), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", [pytest.param("exits", marks=pytest.mark.long), "killed"])
def test_the_pool_ends_with_its_driver(local_ray, how):
    run = subprocess.run([sys.executable, "-c", DRIVER, local_ray, how], stdout=subprocess.PIPE, text=True)
    assert run.returncode == (0 if how == "exits" else -signal.SIGKILL)
    pids = {int(pid) for pid in re.findall(r"\d+", run.stdout)}
    assert len(pids) >= 2
    eventually(lambda: not any(map(is_running, pids)), "the processes of the pool are gone")


@pytest.mark.long  # in short: test_fan_out_shares.py
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


@pytest.mark.long
@pytest.mark.slow
def test_items_of_a_lost_node_run_on_the_others():
    with simulated_nodes([{"num_cpus": 1}, {"num_cpus": 1}]) as cluster, connected(cluster.address):
        wait_for_all_hosts()
        outcomes = fan_out_as_completed(lambda i: (time.sleep(0.05), i)[1], range(30), batch_size=2)
        values = [next(outcomes).result()]
        (worker,) = cluster.worker_nodes
        cluster.remove_node(worker, allow_graceful=False)
        values += [outcome.result() for outcome in outcomes]
        assert sorted(values) == list(range(30))
        close_fan_out()
