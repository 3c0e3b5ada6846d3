"""Questions over a Unix socket: each gets its own answer, whoever interrupts, forks or closes what."""

import asyncio
import contextlib
import gc
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from pressing import press_everywhere

from raycrew.tensor_transport.errors import TransportError, TransportTimeoutError, UpdateAbortedError
from raycrew.tensor_transport.weights._directory import local_socket
from raycrew.tensor_transport.weights._directory.local_socket import (
    Address,
    ElsewhereError,
    LocalClient,
    LocalServer,
)

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

TIMEOUT_S = 30.0


class UnreadableError(Exception):
    def __reduce__(self):
        raise TypeError("not to be pickled")


class LongError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Answers:
    """What the server under test is asked."""

    def __init__(self):
        self.asked = []
        self.may_go_on, self.may_end = threading.Event(), threading.Event()

    async def __call__(self, method, args):
        self.asked.append(method)
        return await getattr(self, method)(*args)

    async def echo(self, value):
        return value

    async def wait(self, value):
        while not self.may_go_on.is_set():
            await asyncio.sleep(0.001)
        return value

    async def refuse(self, error):
        raise error

    async def refuse_oddly(self):
        raise UnreadableError("what it says")

    async def refuse_at_length(self):
        raise LongError("what it", "says")

    async def stand_still(self):
        """Until it may go on, and once more between this answer and whatever is asked meanwhile."""
        asyncio.get_running_loop().call_soon(self.may_end.wait, TIMEOUT_S)
        self.may_go_on.wait(TIMEOUT_S)

    async def answer_oddly(self):
        return UnreadableError()

    async def reference(self):
        return [reference()]


def reference():
    import ray

    return ray.ObjectRef(b"1" * 28)


async def end(server):
    server._server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def serving(answers):
    """A server of this process, and its address."""
    loop, server = asyncio.new_event_loop(), LocalServer(answers)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server, asyncio.run_coroutine_threadsafe(server.start(), loop).result(TIMEOUT_S)
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result(TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_S)
        loop.close()


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def server(answers):
    with serving(answers) as (server, address):
        server.address = address
        yield server


@pytest.fixture
def client(server):
    client = LocalClient(server.address)
    yield client
    client.close()


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(client, method, *args, timeout_s=TIMEOUT_S, check=lambda: None):
    return client.ask(method, args, timeout_s, check)


def sockets():
    """How many Unix sockets this process has open: those to other nodes, as of a Ray, come and go."""
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return sum(str(link) in unix for link in map(target, Path("/proc/self/fd").iterdir()))


def target(link):
    try:
        return link.readlink()
    except OSError:  # that of the folder itself
        return ""


@pytest.mark.parametrize(
    "value",
    [None, b"", {"a": [1, (2.5, "ü")]}, b"x" * (5 << 20)],
    ids=["none", "empty", "nested", "megabytes"],
)
def test_an_answer_is_what_was_answered(client, value):
    assert ask(client, "echo", value) == value


def test_what_is_raised_is_raised_where_it_was_asked_and_the_connection_serves_on(client):
    before = sockets()
    for error in (ValueError("nothing is there"), UpdateAbortedError("given up"), KeyError("x")):
        with pytest.raises(type(error), match=str(error.args[0])):
            ask(client, "refuse", error)
    assert ask(client, "echo", 1) == 1
    assert sockets() <= before + 2  # this side's and the server's


def test_an_error_or_an_answer_that_cannot_be_handed_on_is_told(client):
    with pytest.raises(TransportError, match="what it says"):
        ask(client, "refuse_oddly")
    with pytest.raises(TransportError, match="what it says"):
        ask(client, "refuse_at_length")
    with pytest.raises(TypeError, match="not to be pickled"):
        ask(client, "answer_oddly")
    assert ask(client, "echo", 1) == 1


def test_threads_ask_at_the_same_time_and_a_question_that_waits_holds_up_none(client, answers):
    with ThreadPoolExecutor(9) as pool:
        waiting = pool.submit(ask, client, "wait", "late")
        values = [(i, os.urandom(8)) for i in range(800)]
        found = list(pool.map(lambda value: ask(client, "echo", value), values))
        assert found == values
        assert not waiting.done()
        answers.may_go_on.set()
        assert waiting.result(TIMEOUT_S) == "late"


class Interrupt(BaseException):
    pass


def test_after_an_interrupt_the_answer_to_an_earlier_question_is_not_taken_for_that_to_a_later_one(
    client, answers, monkeypatch
):
    monkeypatch.setattr(local_socket, "_SLICE_S", 0.01)

    def interrupt():
        raise Interrupt

    assert ask(client, "echo", "first") == "first"
    with pytest.raises(Interrupt):
        ask(client, "wait", "the earlier one", check=interrupt)
    answers.may_go_on.set()
    assert [ask(client, "echo", i) for i in range(3)] == [0, 1, 2]


def test_what_is_asked_after_a_question_that_was_given_up_is_read_after_it(client, answers, monkeypatch):
    """Also where the server had not even taken the connection when it came to stand still."""
    monkeypatch.setattr(local_socket, "_SLICE_S", 0.01)
    sent, later_sent, is_late = threading.Event(), threading.Event(), threading.Event()

    def give_up():
        sent.set()
        if is_late.is_set():
            raise Interrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, client, "stand_still")
        wait_until(lambda: answers.asked)
        earlier = pool.submit(ask, client, "echo", "earlier", check=give_up)
        assert sent.wait(TIMEOUT_S)
        answers.asked.clear()
        answers.may_go_on.set()
        first.result(TIMEOUT_S)
        is_late.set()
        assert isinstance(earlier.exception(TIMEOUT_S), Interrupt)
        later = pool.submit(ask, client, "wait", "later", check=later_sent.set)
        assert later_sent.wait(TIMEOUT_S)
        answers.may_end.set()
        assert later.result(TIMEOUT_S) == "later"
    assert answers.asked == ["echo", "wait"]


def test_a_server_that_does_not_answer_is_given_up_in_time(client, answers):
    began = time.monotonic()
    with pytest.raises(TransportTimeoutError, match=r"within 0\.2 s"):
        ask(client, "wait", 1, timeout_s=0.2)
    assert time.monotonic() - began < TIMEOUT_S
    answers.may_go_on.set()
    assert ask(client, "echo", 2) == 2


def test_a_message_that_nobody_reads_is_given_up_in_time():
    """The server's process stands still, and more is said than the system keeps."""
    with other_process() as (process, address):
        client = LocalClient(address)
        assert ask(client, "echo", 1) == 1
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(TransportTimeoutError):
                ask(client, "echo", b"x" * (8 << 20), timeout_s=0.5)
            with pytest.raises(TransportTimeoutError):
                ask(client, "echo", 2, timeout_s=0.5)
        finally:
            process.send_signal(signal.SIGCONT)
        assert ask(client, "echo", 3) == 3
        client.close()


SERVER = """
import asyncio, sys
from raycrew.tensor_transport.weights._directory.local_socket import LocalServer

async def answer(method, args):
    return args[0]

async def main():
    server = LocalServer(answer)
    print(*await server.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


def test_so_many_as_a_machine_has_may_ask_while_the_server_stands_still():
    with other_process() as (process, address):
        process.send_signal(signal.SIGSTOP)
        most = int(Path("/proc/sys/net/core/somaxconn").read_text())
        clients = [LocalClient(address) for _ in range(min(most, 300))]
        waiting = [client._connection() for client in clients]
        process.send_signal(signal.SIGCONT)
        assert ask(clients[0], "echo", 1) == 1
        for connection in waiting:
            connection.close()


@contextlib.contextmanager
def other_process():
    """A server in another process, and its address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        name, pid = process.stdout.readline().split()
        try:
            yield process, Address(name, int(pid))
        finally:
            process.kill()


def test_the_end_of_the_server_is_seen_at_once_and_leaves_nothing():
    with other_process() as (process, address):
        client = LocalClient(address)
        assert ask(client, "echo", 1) == 1
        process.kill()
        process.wait(TIMEOUT_S)
    with pytest.raises(ConnectionError):
        ask(client, "echo", 2)
    with pytest.raises(ElsewhereError):
        ask(client, "echo", 3)


def test_who_took_the_address_of_a_server_that_ended_is_not_asked(answers):
    """Names of such sockets can be seen by everybody, and had again."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind("\0raycrew-taken")
        squatter.listen()
        with pytest.raises(ElsewhereError) as raised:
            ask(LocalClient(Address("raycrew-taken", os.getpid() + 1)), "echo", 1)
        connection, _ = squatter.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            assert connection.recv(1) == b"", f"it is held open by {raised}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer_and_is_not_read(server, answers):
    if not (child := os.fork()):
        os.setuid(65534)
        os._exit(answered(server.address.name))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert answers.asked == []


def answered(name):
    """Whether whoever sends a question that is well-formed is answered; 2 where it can't even connect."""
    asked = pickle.dumps(("echo", (1,)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mine:
        try:
            mine.connect(f"\0{name}")
        except OSError:
            return 2
        with contextlib.suppress(ConnectionError):
            mine.sendall(struct.pack("<Q", len(asked)) + asked)
            return int(bool(mine.recv(100)))
    return 0


def test_whoever_asks_so_as_the_same_user_is_answered(server):
    assert answered(server.address.name) == 1


@pytest.mark.hostile
@pytest.mark.parametrize("is_reused", [False, True], ids=["closed", "reused"])
def test_a_descriptor_that_somebody_closed_is_not_written_to(client, tmp_path, is_reused):
    assert ask(client, "echo", 1) == 1
    (connection,) = client._idle
    fd = connection._socket.fileno()
    os.close(fd)
    path = tmp_path / "theirs"
    if is_reused:
        theirs = os.open(path, os.O_CREAT | os.O_RDWR)
        if theirs != fd:
            os.dup2(theirs, fd)
            os.close(theirs)
    assert ask(client, "echo", 2) == 2
    client.close()
    gc.collect()
    if is_reused:
        assert os.fstat(fd).st_size == 0
        os.close(fd)


@pytest.mark.hostile
def test_a_forked_child_shares_no_connection_and_closes_none(client):
    assert ask(client, "echo", 1) == 1
    if not (child := os.fork()):
        gc.collect()
        client.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(client, "echo", 2) == 2


@pytest.mark.hostile
def test_an_interrupt_at_any_moment_leaves_no_descriptor_and_no_answer_to_another_question(server):
    clients = [LocalClient(server.address)]
    numbers = itertools.count()

    def some():
        for number in itertools.islice(numbers, 2):
            assert ask(clients[0], "echo", number) == number

    some()
    before = sockets()
    for nth in press_everywhere(some, ("/local_socket.py",)):
        some()
        if nth % 2:
            clients[0] = LocalClient(server.address)
    clients[0].close()
    gc.collect()
    wait_until(lambda: sockets() < before)
    assert nth > 20


@pytest.mark.hostile
@pytest.mark.parametrize(
    "said",
    [b"", b"\1\0", b"\xff" * 8 + b"much more", struct.pack("<Q", 0), struct.pack("<Q", 3) + b"xyz"],
    ids=["nothing", "half a size", "a huge size", "an empty question", "no question"],
)
def test_who_says_what_makes_no_sense_holds_up_nobody_and_leaves_nothing(client, server, said):
    before = sockets()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{server.address.name}")
        stranger.sendall(said)
        assert ask(client, "echo", 1) == 1
    client.close()
    wait_until(lambda: sockets() <= before)


def test_a_client_that_is_forgotten_leaves_no_descriptor(server):
    before = sockets()
    client = LocalClient(server.address)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(ask, client, "echo"), range(100)))
    assert sockets() > before
    del client
    gc.collect()
    wait_until(lambda: sockets() <= before)


def test_what_only_ray_hands_on_is_not_asked_over_a_socket(client, answers):
    with pytest.raises(ElsewhereError) as raised:
        ask(client, "echo", {"deep": [reference()]})
    assert not raised.value.token
    assert answers.asked == []


def test_an_answer_that_only_ray_hands_on_is_made_once_and_had_once(client, server, answers):
    with pytest.raises(ElsewhereError) as raised:
        ask(client, "reference")
    assert server.take_parked(raised.value.token) == [reference()]
    assert answers.asked == ["reference"]
    with pytest.raises(TransportError, match="not asked for in time"):
        server.take_parked(raised.value.token)


def test_an_answer_that_nobody_has_is_forgotten(client, server, monkeypatch):
    monkeypatch.setattr(local_socket, "_PARKED_S", 0.01)
    with pytest.raises(ElsewhereError):
        ask(client, "reference")
    wait_until(lambda: not server._parked)


def test_a_class_of_a_program_itself_is_handed_on(client):
    """As that of the tickets of somebody's own store."""

    class Ticket:
        def __init__(self, number):
            self.number = number

    assert ask(client, "echo", Ticket(7)).number == 7


def test_a_class_of_no_module_is_handed_on(client):
    class Ticket:
        __module__ = None

    assert type(ask(client, "echo", Ticket())).__name__ == "Ticket"
