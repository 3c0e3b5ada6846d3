"""Ports: unique while they are held, usable by the server they are meant for; bad ranges refused."""

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest

from raycrew.cluster_core import PortsExhaustedError, lease_ports
from raycrew.cluster_core._ports import leases
from raycrew.cluster_core._ports.leases import default_port_range, ephemeral_range

LOW = 7200  # Each test takes its own stretch from here; who names no range is given other ports.


def listen(port, host="0.0.0.0", *, reuse):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        server.bind((host, port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.mark.smoke
def test_a_leased_port_is_kept_for_a_server_that_reuses_it():
    with lease_ports(port_range=(LOW, LOW + 20)) as lease:
        assert LOW <= lease.port <= LOW + 20
        with pytest.raises(OSError, match="in use"):
            listen(lease.port, reuse=False)
        with listen(lease.port, reuse=True), socket.create_connection(("127.0.0.1", lease.port), timeout=10):
            pass


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", None])
def test_hosts(host):
    try:
        lease = lease_ports(2, port_range=(LOW + 30, LOW + 40), host=host)
    except ValueError:
        pytest.skip(f"{host} is not on this machine")
    with lease:
        names = [host] if host else ["127.0.0.1", *(["::1"] if has_ipv6() else [])]
        for port, name in itertools.product(lease.ports, names):
            with pytest.raises(OSError, match="in use"):
                listen(port, name, reuse=False)
            listen(port, name, reuse=True).close()


def has_ipv6():
    try:
        listen(0, "::1", reuse=True).close()
    except OSError:
        return False
    return True


def test_release_gives_the_ports_back_and_can_be_repeated():
    lease = lease_ports(3, port_range=(LOW + 50, LOW + 52))
    with pytest.raises(PortsExhaustedError, match="no port is free in") as caught:
        lease_ports(port_range=(LOW + 50, LOW + 52))
    assert caught.value.port_range == (LOW + 50, LOW + 52)
    assert pickle.loads(pickle.dumps(caught.value)).port_range == (LOW + 50, LOW + 52)
    lease.release()
    lease.release()
    with lease_ports(3, port_range=(LOW + 50, LOW + 52)) as again:
        assert again.ports == lease.ports


def test_a_port_in_time_wait_is_leased_when_nothing_else_is_left():
    port = LOW + 55
    server = listen(port, "127.0.0.1", reuse=True)
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    accepted, _ = server.accept()
    accepted.close()  # The side that closes first stays in TIME_WAIT.
    client.close()
    server.close()
    with lease_ports(port_range=(port, port)) as lease:
        assert lease.port == port


def test_a_port_that_somebody_listens_on_is_passed_over():
    with listen(LOW + 61, reuse=True), lease_ports(2, port_range=(LOW + 60, LOW + 62)) as lease:
        assert lease.ports == (LOW + 60, LOW + 62)
        with pytest.raises(PortsExhaustedError, match="no 2 consecutive ports are free"):
            lease_ports(2, port_range=(LOW + 60, LOW + 62), consecutive=True)


def test_consecutive_blocks_fill_the_range_around_what_is_taken():
    low = LOW + 70
    with contextlib.ExitStack() as stack:
        stack.enter_context(listen(low + 3, reuse=True))
        blocks = [
            stack.enter_context(lease_ports(3, port_range=(low, low + 9), consecutive=True)) for _ in range(3)
        ]
        ports = [block.ports for block in blocks]
        assert ports == [tuple(range(start, start + 3)) for start in (low, low + 4, low + 7)]
        with pytest.raises(PortsExhaustedError):
            lease_ports(port_range=(low, low + 9))


def test_a_lease_ends_with_its_process():
    code = f"""
from raycrew.cluster_core import lease_ports
import os
lease = lease_ports(2, port_range=({LOW + 85}, {LOW + 86}))
print(*lease.ports, flush=True)
input()
os.kill(os.getpid(), 9)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline().split() == [str(LOW + 85), str(LOW + 86)]
    with pytest.raises(PortsExhaustedError):
        lease_ports(port_range=(LOW + 85, LOW + 86))
    child.communicate("\n", timeout=60)
    lease_ports(2, port_range=(LOW + 85, LOW + 86)).release()


def test_a_forked_process_has_no_part_in_a_lease():
    """It neither ends the lease of its parent nor keeps the port once that has released it."""
    code = f"""
import os
from raycrew.cluster_core import PortsExhaustedError, lease_ports
where = ({LOW + 90}, {LOW + 90})
lease, (told, tell), (ends, end) = lease_ports(port_range=where), os.pipe(), os.pipe()
child = os.fork()
if not child:
    os.close(end)
    os.write(tell, b"there")
    os.read(ends, 1)
    os._exit(0)
os.read(told, 5)
try:
    lease_ports(port_range=where)
except PortsExhaustedError:
    print("held")
lease.release()
print(lease_ports(port_range=where).port)
os.close(end)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["held", str(LOW + 90)], done.stderr


def test_a_process_that_is_forked_while_ports_are_leased_has_no_part_in_them(monkeypatch):
    search, children = leases._scattered, []

    def fork_amid(*arguments):
        held = search(*arguments)
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
        return held

    where = (LOW + 94, LOW + 94)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "_scattered", fork_amid)
        lease = lease_ports(port_range=where)
    try:
        with pytest.raises(PortsExhaustedError):
            lease_ports(port_range=where)
        lease.release()
        lease_ports(port_range=where).release()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


GROUPS = """
import sys
from raycrew.cluster_core import lease_ports
low, high = map(int, sys.argv[1:])
for _ in sys.stdin:
    leases = [lease_ports(port_range=(low, high)) for _ in range(16)]
    print(*(lease.port for lease in leases), flush=True)
    sys.stdin.readline()
    for lease in leases:
        lease.release()
    print(flush=True)
"""


def test_64_groups_share_a_range_of_70_ports_100_times():
    low, high = LOW + 100, LOW + 169
    children = [
        subprocess.Popen(
            [sys.executable, "-c", GROUPS, str(low), str(high)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for _ in range(4)
    ]  # fmt: skip

    def in_step():
        for child in children:
            child.stdin.write("next\n")
        return [child.stdout.readline() for child in children]

    for _ in range(100):
        taken = Counter(int(port) for line in in_step() for port in line.split())
        assert len(taken) == 64
        assert set(taken.values()) == {1}
        assert min(taken) >= low and max(taken) <= high
        in_step()
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        ((32768, 60999), (20000, 32767)),
        ((20500, 65535), (20000, 20499)),
        ((9000, 65535), (1024, 8999)),
        ((16000, 65535), (1024, 10001)),
        ((1100, 60999), (61000, 65535)),
    ],
)
def test_the_default_range_is_clear_of_ephemeral_ports_and_of_ray_workers(ephemeral, expected):
    assert default_port_range(ephemeral) == expected


@pytest.mark.smoke
def test_no_range_is_left():
    with pytest.raises(PortsExhaustedError, match="1025-65530 leaves no ports"):
        default_port_range((1025, 65530))


def test_the_default_range_is_read_from_the_system(tmp_path):
    source = tmp_path / "range"
    source.write_text("9000\t60999\n")
    assert ephemeral_range(source) == (9000, 60999)
    with lease_ports() as lease:
        low, high = default_port_range()
        assert low <= lease.port <= high


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"port_range": (80, 2000)}, ValueError, "80-2000 reaches outside 1024-65535"),
        ({"port_range": (2000, 70000)}, ValueError, "70000"),
        ({"port_range": (3000, 2000)}, ValueError, "reversed"),
        ({"port_range": (3000.0, 4000)}, TypeError, "pair of integers"),
        ({"port_range": (True, 4000)}, TypeError, "pair of integers"),
        ({"port_range": (3000,)}, TypeError, "pair of integers"),
        ({"count": 0}, ValueError, "count 0"),
        ({"count": 12, "port_range": (3000, 3010)}, ValueError, "count 12 is outside 1 to 11"),
        ({"count": 1.0}, TypeError, "integer"),
        ({"host": "203.0.113.7"}, ValueError, r"203\.0\.113\.7.* no address of this node"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        lease_ports(**arguments)
