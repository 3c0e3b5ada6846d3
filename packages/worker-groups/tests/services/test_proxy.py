"""One endpoint for several servers: what is sent again, what is told, what is refused."""

import asyncio
import http.client
import json
import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from asking import ask, head_of, is_open, serving
from patience import eventually

pytest.importorskip("uvicorn")

from raycrew.cluster_core import lease_ports
from raycrew.worker_groups.services import Endpoint, Proxy, ServiceClosedError
from raycrew.worker_groups.services._asgi import FULL
from raycrew.worker_groups.services._forwarding import Choosing, Forwarder, Limits

SERVERS_TOKEN = "the-servers-own-token"


def answers(name, body=None):
    """A server that says who it is, and what it heard."""

    def answer(connection):
        heard = head_of(connection)
        said = json.dumps({"name": name, "head": heard.decode("latin-1")}).encode() if body is None else body
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(said), said))

    return answer


def drops(connection):
    """A server that dies as soon as it has heard a request."""
    head_of(connection)


def breaks_off(connection):
    """A server that dies in the middle of an answer."""
    head_of(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")


@contextmanager
def proxy_of(*servers, token=None, **options):
    """A proxy of some servers, in their order while all have nothing to do; a number is a port."""
    with ExitStack() as stack:
        ports = [one if isinstance(one, int) else stack.enter_context(serving(one)) for one in servers]
        endpoints = [
            Endpoint(f"http://127.0.0.1:{port}", SERVERS_TOKEN, rank) for rank, port in enumerate(ports)
        ]
        quick = {"strategy": lambda loads, _: loads[0].rank, "token": token, "timeout_s": 30.0}
        yield stack.enter_context(Proxy(endpoints, **quick | options))


def outcome(proxy, *args, **options):
    status, headers, body = ask(proxy.endpoint, *args, **options)
    told = json.loads(body)["outcome"]
    assert headers["x-raycrew-outcome"] == told.replace(" ", "-")
    return status, told


def name_of(answer):
    """Which server has answered."""
    return json.loads(answer[2])["name"]


@pytest.fixture
def nobody():
    """A port that nobody listens on."""
    with lease_ports(host="127.0.0.1") as lease:
        yield lease.port


def test_a_request_goes_on_with_the_servers_token_and_the_answer_comes_back():
    with proxy_of(answers("one"), token="auto") as proxy:
        status, headers, body = ask(proxy.endpoint, "/a%20b?c=d", headers={"X-Mine": "1"})
        assert (status, headers["x-raycrew-replica"]) == (200, "0")
        head = json.loads(body)["head"]
        assert head.startswith("GET /a%20b?c=d HTTP/1.1\r\n")
        assert f"Authorization: Bearer {SERVERS_TOKEN}\r\n" in head
        assert proxy.endpoint.token not in head
        assert "x-mine: 1\r\n" in head
        assert ask(proxy.endpoint, "/", told=False)[0] == 401
        assert proxy.endpoint.token not in repr(proxy) + repr(proxy.endpoint)
        with pytest.raises(TypeError, match="endpoint"):
            pickle.dumps(proxy)
        port = proxy.endpoint.port
    assert not is_open(port)
    with pytest.raises(ServiceClosedError):
        _ = proxy.endpoint
    proxy.shutdown()


def test_whoever_can_not_be_connected_to_has_surely_not_run_a_request(nobody):
    with proxy_of(nobody, answers("two")) as proxy:
        assert ask(proxy.endpoint, "/", method="POST", body=b"x")[0] == 200
    with proxy_of(nobody, patience_s=0.2) as proxy:
        assert outcome(proxy, "/", method="POST", body=b"x") == (503, "surely not run")
        assert outcome(proxy, "/") == (503, "surely not run")


def test_patience_ends_though_a_server_is_tried_again_and_again(nobody):
    with proxy_of(nobody, patience_s=1.2, timeout_s=60.0) as proxy:
        assert outcome(proxy, "/", method="POST", body=b"x") == (503, "surely not run")
    with proxy_of(nobody, answers("two"), patience_s=0) as proxy:
        assert ask(proxy.endpoint, "/", method="POST", body=b"x")[0] == 200


def full(connection):
    """A server that has no place for another connection."""
    head_of(connection)
    connection.sendall(FULL)


def test_whom_a_full_server_turns_away_has_surely_not_run():
    with proxy_of(full, answers("two")) as proxy:
        assert name_of(ask(proxy.endpoint, "/", method="POST", body=b"x")) == "two"
    with proxy_of(full, patience_s=0) as proxy:
        assert outcome(proxy, "/", method="POST", body=b"x") == (503, "surely not run")
    with proxy_of(full, answers("two"), held_bytes=4) as proxy:
        assert outcome(proxy, "/", method="POST", body=b"too long to go twice") == (503, "surely not run")


def test_clients_above_the_limit_are_told_so():
    with (
        proxy_of(answers("one"), max_connections=1) as proxy,
        socket.create_connection(("127.0.0.1", proxy.endpoint.port)),
    ):
        assert outcome(proxy, "/") == (503, "surely not run")


@pytest.mark.parametrize("lost", [drops, breaks_off])
def test_a_request_that_is_lost_goes_to_another_server_only_if_it_may(lost):
    with proxy_of(lost, answers("two")) as proxy:
        assert outcome(proxy, "/", method="POST", body=b"x") == (502, "perhaps run")
    with proxy_of(lost, answers("two")) as proxy:
        marked = {"Idempotency-Key": "7"}
        assert name_of(ask(proxy.endpoint, "/", method="POST", body=b"x", headers=marked)) == "two"
    with proxy_of(lost, answers("two")) as proxy:
        assert name_of(ask(proxy.endpoint, "/")) == "two"


def test_a_request_that_kills_whom_it_gets_to_is_not_sent_for_ever(nobody):
    heard = []

    def dies(connection):
        heard.append(head_of(connection))

    with proxy_of(dies, dies, dies, dies, resends=2) as proxy:
        assert outcome(proxy, "/") == (502, "perhaps run")
    assert len(heard) == 3
    with proxy_of(drops, nobody, patience_s=0.2, resends=9) as proxy:
        assert outcome(proxy, "/")[1] == "perhaps run"


def test_a_long_answer_that_breaks_off_is_not_ended():
    with proxy_of(breaks_off, held_bytes=4) as proxy, pytest.raises(http.client.IncompleteRead):
        ask(proxy.endpoint, "/")


def test_an_answer_with_two_lengths_has_the_one_that_counts():
    def both(connection):
        head_of(connection)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"5\r\nwhole\r\n0\r\n\r\n")

    with proxy_of(both) as proxy:
        assert ask(proxy.endpoint, "/")[2] == b"whole"


def test_an_answer_that_stops_as_the_request_is_too_long_is_not_ended():
    def unlengthed(connection):
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\npart")
        while connection.recv(65536):
            pass

    chunk = b"a\r\n0123456789\r\n"
    with (
        proxy_of(unlengthed, held_bytes=4, max_body_bytes=20) as proxy,
        socket.create_connection(("127.0.0.1", proxy.endpoint.port), timeout=60) as client,
    ):
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunk)
        heard = client.recv(65536)
        while b"part" not in heard:
            heard += client.recv(65536)
        client.sendall(2 * chunk)
        assert client.recv(65536) == b""


async def _asked_once(send):
    scope = {"method": "GET", "headers": [], "query_string": b"", "raw_path": b"/", "path": "/"}
    sent = asyncio.Queue()
    sent.put_nowait({"type": "http.request"})
    with serving(answers("one")) as port:
        choosing = Choosing(lambda: [Endpoint(f"http://127.0.0.1:{port}")], "round_robin")
        limits = Limits(timeout_s=30, patience_s=0, resends=0, body_bytes=9, held_bytes=9)
        await Forwarder(choosing, limits, None, is_guarded=False)(scope, sent.get, send)


def test_an_answer_that_can_not_be_given_to_its_end_is_an_error_for_whoever_serves_it():
    async def takes(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            raise RuntimeError("too little")

    with pytest.raises(RuntimeError, match="too little"):
        asyncio.run(_asked_once(takes))


def test_a_redirect_to_the_server_is_one_to_the_proxy():
    def redirects(connection):
        heard = head_of(connection).decode()
        host = next(line for line in heard.splitlines() if line.startswith("host: ")).removeprefix("host: ")
        where = "http://elsewhere/a" if "/away" in heard else f"http://{host}/score/?a=b"
        connection.sendall(
            f"HTTP/1.1 307 Temporary Redirect\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode()
        )

    with proxy_of(redirects) as proxy:
        assert ask(proxy.endpoint, "/score", method="POST")[1]["location"] == "/score/?a=b"
        assert ask(proxy.endpoint, "/away", method="POST")[1]["location"] == "http://elsewhere/a"


def test_what_is_no_request_to_pass_on_gets_to_no_server():
    heard = []

    def hears(connection):
        heard.append(head_of(connection))

    web_socket = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    both = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
    with proxy_of(hears, held_bytes=4) as proxy:
        assert outcome(proxy, "/", method="TRACE") == (501, "surely not run")
        assert outcome(proxy, "/", headers=web_socket) == (501, "surely not run")
        body = b"5\r\nabcde\r\n5\r\nfghij\r\n0\r\n\r\n"
        assert outcome(proxy, "/", method="POST", body=body, headers=both) == (400, "surely not run")
    assert heard == []


def test_an_answer_is_passed_on_as_it_comes():
    def events(connection):
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.sendall(b"9\r\ndata: 0\n\n\r\n")
        connection.recv(1)  # nothing more, until the client is gone

    with proxy_of(events) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.endpoint.port, timeout=30)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.read1(100) == b"data: 0\n\n"
        connection.close()


def test_a_server_is_told_when_the_client_has_gone():
    heard, ends = [], []

    def waits(connection):
        heard.append(head_of(connection))
        connection.settimeout(60)
        try:
            ends.append(connection.recv(1))
        except OSError as error:
            ends.append(error)

    with proxy_of(waits) as proxy:
        connection = socket.create_connection(("127.0.0.1", proxy.endpoint.port))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: heard, "the server has the request")
        connection.close()
        eventually(lambda: ends, "the server was told")


@contextmanager
def copied_sockets():
    """All sockets of this process have copies, as in a child that was forked."""
    sockets = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if _is_socket(fd)]
    copies = [os.dup(fd) for fd in sockets]
    try:
        yield
    finally:
        for copy in copies:
            os.close(copy)


def _is_socket(fd):
    with suppress(FileNotFoundError):
        return str(fd.readlink()).startswith("socket:")


def test_ends_get_through_though_a_forked_child_has_all_connections():
    heard, go_on = [], threading.Event()

    def server(connection):
        head = head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        if b"GET /break" in head:
            go_on.wait(60)
            connection.shutdown(socket.SHUT_RDWR)
        else:
            heard.append(connection.recv(1))

    with proxy_of(server) as proxy:
        clients = [socket.create_connection(("127.0.0.1", proxy.endpoint.port), timeout=60) for _ in range(2)]
        for client, path in zip(clients, (b"/break", b"/leave"), strict=True):
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096)
        with copied_sockets():
            go_on.set()
            while clients[0].recv(4096):
                pass
            clients[1].shutdown(socket.SHUT_RDWR)
            eventually(lambda: heard == [b""], "the server was told")
            port = proxy.endpoint.port
            proxy.shutdown()
            assert not is_open(port)
        for client in clients:
            client.close()


def test_a_proxy_on_all_addresses_is_reached_by_those_of_both_families():
    with proxy_of(answers("one"), host="::") as proxy:
        for host in ("127.0.0.1", "[::1]"):
            assert ask(Endpoint(f"http://{host}:{proxy.endpoint.port}"), "/")[0] == 200


def test_a_deadline_tells_what_may_have_run(nobody):
    def silent(connection):
        head_of(connection)
        connection.recv(1)

    with proxy_of(silent, timeout_s=1.0) as proxy:  # a busy machine may not send it in time
        eventually(lambda: outcome(proxy, "/") == (504, "perhaps run"), "it was sent")
    with proxy_of(nobody, timeout_s=0.3) as proxy:
        assert outcome(proxy, "/", method="POST", body=b"") == (504, "surely not run")


def test_bodies_are_passed_on_up_to_a_limit():
    def counts(connection):
        head, _, body = head_of(connection).partition(b"\r\n\r\n")
        while not body.endswith(b"0\r\n\r\n" if b"chunked" in head else b"!"):
            body += connection.recv(65536)
        said = b"%d" % len(body)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(said), said))

    with proxy_of(counts, max_body_bytes=300_000, held_bytes=1000) as proxy:
        long = b"x" * 200_000 + b"!"
        assert ask(proxy.endpoint, "/", method="POST", body=long)[2] == b"200001"
        pieces = [b"y" * 50_000] * 4
        assert int(ask(proxy.endpoint, "/", method="POST", body=iter(pieces))[2]) > 200_000
        assert outcome(proxy, "/", method="POST", body=b"x" * 300_001) == (413, "surely not run")


def test_a_session_stays_with_its_server():
    options = {"strategy": "consistent_hash", "key": "header:x-session"}
    with proxy_of(answers("one"), answers("two"), answers("three"), **options) as proxy:
        names = {}
        for session in map(str, range(12)):
            headers = {"X-Session": session}
            names[session] = {name_of(ask(proxy.endpoint, "/", headers=headers)) for _ in range(3)}
    assert all(len(each) == 1 for each in names.values())
    assert len(set.union(*names.values())) > 1


def test_a_session_in_json_is_not_lost_silently():
    options = {"strategy": "consistent_hash", "key": "json:id", "held_bytes": 100}
    with proxy_of(answers("one"), **options) as proxy:
        assert ask(proxy.endpoint, "/", method="POST", body=b'{"id": "a"}')[0] == 200
        assert outcome(proxy, "/", method="POST", body=b'{"id": "a"}' + b" " * 200) == (413, "surely not run")


@pytest.mark.hostile
def test_clients_that_trickle_or_ask_for_too_much_are_let_go():
    with proxy_of(answers("one"), header_timeout_s=1.0, idle_timeout_s=1.0, max_connections=4) as proxy:
        where = ("127.0.0.1", proxy.endpoint.port)
        slow = [socket.create_connection(where) for _ in range(4)]
        for one in slow[:2]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        slow[2].sendall(b"POST / HTTP/1.1\r\nHost: x\r\ncontent-length: 100\r\n\r\nx")
        for one in slow:
            one.settimeout(30)
            try:
                while one.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            one.close()
        assert ask(proxy.endpoint, "/")[0] == 200
        assert ask(proxy.endpoint, "/", headers={"X-Long": "x" * 100_000})[0] in (400, 431)
        with socket.create_connection(where) as absolute:
            absolute.sendall(b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\nconnection: close\r\n\r\n")
            assert absolute.makefile("rb").readline().split()[1] == b"400"


def test_servers_that_are_gone_for_good_are_not_waited_for():
    def closed():
        raise ServiceClosedError("service 'a' was shut down")

    with Proxy(closed, token=None, patience_s=600.0) as proxy:
        assert outcome(proxy, "/") == (503, "surely not run")


def test_many_at_once_are_all_answered():
    options = {"strategy": "least_outstanding"}
    with proxy_of(answers("one"), answers("two"), **options) as proxy, ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(lambda _: ask(proxy.endpoint, "/")[0], range(80)))
    assert statuses == [200] * 80


@pytest.mark.parametrize(
    ("targets", "options", "kind"),
    [
        ([], {}, ValueError),
        (["http://127.0.0.1:1"], {}, TypeError),
        (None, {"strategy": "consistent_hash"}, ValueError),
        (None, {"strategy": "no_such"}, ValueError),
        (None, {"key": "x"}, ValueError),
        (None, {"token": "short"}, ValueError),
        (None, {"token": 7}, TypeError),
        (None, {"resends": -1}, ValueError),
        (None, {"timeout_s": 0}, ValueError),
        (None, {"max_connections": 0}, ValueError),
        (None, {"port": 65536}, ValueError),
        (None, {"host": 7}, TypeError),
        (None, {"patience_s": float("inf")}, ValueError),
    ],
)
def test_what_can_not_be_meant_is_refused(targets, options, kind):
    endpoints = [Endpoint("http://127.0.0.1:1")] if targets is None else targets
    with pytest.raises(kind):
        Proxy(endpoints, **options)
