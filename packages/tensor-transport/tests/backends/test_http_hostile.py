"""Servers among clients that want to exhaust them, and clients among servers that lie; on loopback only."""

import contextlib
import functools
import http.client
import ipaddress
import json
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from raycrew.tensor_transport import (
    DecodeError,
    RTensor,
    ShardLostError,
    ShardRead,
    ShardRegistry,
    StaleHandleError,
    TensorShardInfo,
    TransportError,
    TransportTimeoutError,
)

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from raycrew.tensor_transport.backends.http import HttpBackend, ShardServer

pytestmark = pytest.mark.hostile
TOKEN = "a token that is long enough"


def shard_on(url, dtype="float32", shape=(4,)):
    return TensorShardInfo("http", "s" * 32, "epoch", "node", dtype, shape, url)


def until_end(connection):
    """What comes until the other side closes."""
    connection.settimeout(60)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def whole_request(connection):
    """A request to its end: a connection that is closed with bytes unread is reset."""
    found = b""
    while b"\r\n\r\n" not in found and (piece := connection.recv(1 << 16)):
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    left = sum(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")) - len(
        body
    )
    while left > 0 and (piece := connection.recv(1 << 16)):
        left -= len(piece)
    return found


@contextlib.contextmanager
def peer(serve):
    """A server by hand, `serve(connection, number, over)` for each connection; its URL, what it was sent."""
    seen, over = [], threading.Event()

    def work(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(60)
                    seen.append(whole_request(connection))
                    serve(connection, len(seen), over)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=work, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def answering(header, data=b"", length=None):
    def serve(connection, number, over):
        text = json.dumps(header).encode()
        size = 8 + len(text) + len(data) if length is None else length
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()
        connection.sendall(head + len(text).to_bytes(8, "little") + text + data)

    return serve


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_token_goes_to_no_host_that_was_not_named():
    with ShardServer() as server, peer(answering({})) as (url, seen):
        backend = HttpBackend(server.url, server.token)
        for work in (
            lambda: backend.fetch([ShardRead(shard_on(url))]),
            lambda: backend.release([shard_on(url)]),
        ):
            with pytest.raises(
                TransportError, match="is not among the servers that this backend was told of"
            ):
                work()
        for url in ("ftp://x", "http://user@127.0.0.1:1", "//x", "http://127.0.0.1:99999", None, 7):
            with pytest.raises(TransportError, match="names no server"):
                backend.fetch([ShardRead(shard_on(url))])
        assert not seen
        backend.close()


def test_each_named_server_has_its_own_token():
    with ShardServer() as first, ShardServer() as second:
        backends = [HttpBackend(first.url, first.token, servers={second.url: second.token})]
        backends.append(HttpBackend(second.url, second.token))
        (shard,) = backends[1].put([torch.arange(5)])
        assert torch.equal(ShardRegistry(backends[0]).fetch([RTensor(shard)])[0], torch.arange(5))
        with pytest.raises(TransportError, match="401"):
            HttpBackend(first.url, first.token, servers=[second.url]).fetch([ShardRead(shard)])
        for backend in backends:
            backend.close()


F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HUGE = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"0": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}, bytes(16), None),
        ({"0": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16), None),
        ({"0": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}, bytes(16), None),
        ({"0": HUGE}, b"", (1 << 42) + 100),
        ({"0": F32, "1": {**HUGE, "data_offsets": [16, 16 + (1 << 42)]}}, bytes(16), None),
        ({"1": F32}, bytes(16), None),
        ({}, b"", None),
        ({"0": F32}, bytes(16), 10**9),
        ({"0": F32}, bytes(20), None),
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_refused_before_memory_is_taken(header, data, length):
    with peer(answering(header, data, length)) as (url, _):
        backend = HttpBackend(url, TOKEN, timeout_s=30)
        with pytest.raises(DecodeError):
            ShardRegistry(backend).fetch([RTensor(shard_on(url))])
        backend.close()


@pytest.mark.parametrize(
    "answer", [b"[]", b"{}", b'{"epoch": 3, "released": "x"}', b"{", b'{"shards": 1, "x": 2}']
)
def test_an_answer_that_is_no_answer_is_named(answer):
    def serve(connection, number, over):
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)

    with peer(serve) as (url, _):
        backend = HttpBackend(url, TOKEN, timeout_s=30)
        for work in (
            lambda: backend.put([torch.ones(2)])[0].locator,
            lambda: backend.expire("x"),
            backend.stats,
        ):
            if answer == b"{}" and work == backend.stats:
                continue  # Figures that are not there are zero.
            with pytest.raises(DecodeError):
                work()
        backend.close()


def head_that_trickles(connection, number, over):
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 10_000:
        connection.sendall(bytes([byte]))
        if over.wait(0.05):
            return


def body_that_trickles(connection, number, over):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b" ")


@pytest.mark.parametrize("serve", [head_that_trickles, body_that_trickles])
def test_a_request_has_one_deadline_whatever_trickles_in(serve):
    with peer(serve) as (url, _):
        backend = HttpBackend(url, TOKEN, timeout_s=0.5)
        done = threading.Event()

        def ask():
            with contextlib.suppress(TransportTimeoutError):
                backend.stats()
                return
            done.set()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert done.wait(20), "a request went on long after its deadline"
        thread.join()


@pytest.mark.parametrize("answer", ["none", "unknown", "known"])
def test_the_look_up_of_a_name_counts(monkeypatch, answer):
    """The resolver keeps no deadline but its own, which may be a minute."""
    look_up, over = socket.getaddrinfo, threading.Event()

    def resolve(host, port, *args, flags=0, **options):
        if host != "a.name" or flags & socket.AI_NUMERICHOST:
            return look_up(host, port, *args, flags=flags, **options)
        if answer == "none":
            assert over.wait(60)
        if answer != "known":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return look_up("127.0.0.1", port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with ShardServer() as server:
        timeout_s = 0.2 if answer == "none" else 30
        backend = HttpBackend(f"http://a.name:{server.port}", server.token, timeout_s=timeout_s)
        if answer == "known":
            assert backend.stats().shards == 0
        else:
            error = TransportTimeoutError if answer == "none" else ShardLostError
            with pytest.raises(error, match=r"a\.name"):
                backend.stats()
        over.set()
        backend.close()


def test_a_reset_of_a_fresh_connection_is_not_the_end():
    def serve(connection, number, over):
        if number <= 2:
            reset(connection)
        else:
            answering({"0": F32}, struct.pack("4f", 1, 2, 3, 4))(connection, number, over)

    with peer(serve) as (url, seen):
        backend = HttpBackend(url, TOKEN, timeout_s=30)
        assert ShardRegistry(backend).fetch([RTensor(shard_on(url))])[0].tolist() == [1, 2, 3, 4]
        assert len(seen) == 3
        backend.close()


def test_a_peer_that_always_resets_is_lost_after_a_few_tries():
    with peer(lambda connection, number, over: reset(connection)) as (url, seen):
        backend = HttpBackend(url, TOKEN, timeout_s=30)
        with pytest.raises(ShardLostError, match="cannot be reached"):
            ShardRegistry(backend).fetch([RTensor(shard_on(url))])
        assert len(seen) == 4
        backend.close()


def test_idle_connections_close_and_leave_room_for_others():
    with ShardServer(max_connections=8, header_timeout_s=0.5) as server, contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(40)
        ]
        idle[0].sendall(b"GET /health HTT")
        assert len(server._socket.descriptors()) <= 8 + 8 + 1
        for connection in idle:
            assert until_end(connection) == b""
        backend = HttpBackend(server.url, server.token)
        (shard,) = backend.put([torch.ones(3)])
        assert torch.equal(ShardRegistry(backend).fetch([RTensor(shard)])[0], torch.ones(3))
        backend.close()


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_strangers_that_say_nothing_keep_nobody_out(request, speaks_tls):
    options, trusting = {}, None
    if speaks_tls:
        folder = request.getfixturevalue("certificate")
        options["ssl_context"] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        options["ssl_context"].load_cert_chain(folder / "cert.pem", folder / "key.pem")
        trusting = functools.partial(ssl.create_default_context, cafile=str(folder / "cert.pem"))
    with (
        ShardServer(max_connections=4, header_timeout_s=300.0, **options) as server,
        contextlib.ExitStack() as stack,
    ):
        backend = HttpBackend(server.url, server.token, ssl_context=trusting)
        for _ in range(3):
            for _ in range(10):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            (shard,) = backend.put([torch.ones(3)])
            assert torch.equal(ShardRegistry(backend).fetch([RTensor(shard)])[0], torch.ones(3))
        assert len(backend._client._idle) == 1, "it had one connection all the time"
        backend.close()


def test_clients_that_know_the_token_are_counted_apart():
    with ShardServer(max_connections=2, header_timeout_s=300.0) as server, contextlib.ExitStack() as stack:

        def answered():
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            head = f"GET /stats HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n"
            connection.sendall(head.encode())
            return connection, connection.recv(12)

        first, second = answered(), answered()
        assert [first[1], second[1], answered()[1]] == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503"]
        first[0].close()
        deadline = time.monotonic() + 60
        while answered()[1] != b"HTTP/1.1 200":  # Until the server has seen that.
            assert time.monotonic() < deadline


WITH_FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from raycrew.tensor_transport.backends.http import ShardServer
with ShardServer(header_timeout_s=1.0) as server:
    print(server.port, server.token, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.long
def test_by_default_idle_connections_leave_descriptors_to_a_process_that_has_few():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2048), hard), hard))
    host = subprocess.Popen(
        [sys.executable, "-c", WITH_FEW_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with host, contextlib.ExitStack() as stack:
        stack.callback(host.stdin.close)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        port, token = host.stdout.readline().split()
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), timeout=60))
            for _ in range(500)
        ]
        taken = len(list(Path(f"/proc/{host.pid}/fd").iterdir()))
        assert taken < 400 - 50, "the process itself has some left"
        for connection in idle:
            with contextlib.suppress(ConnectionError):
                assert until_end(connection) == b""
        backend = HttpBackend(f"http://127.0.0.1:{port}", token)
        stack.callback(backend.close)
        (shard,) = backend.put([torch.ones(3)])
        assert torch.equal(ShardRegistry(backend).fetch([RTensor(shard)])[0], torch.ones(3))


def test_a_head_that_trickles_in_ends_its_connection():
    with (
        ShardServer(header_timeout_s=0.5) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.settimeout(0.05)
        deadline = time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            while time.monotonic() < deadline:
                connection.sendall(b"X: 1\r\n")
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(100):
                        return
            raise AssertionError("the server waits for ever")


def upload(connection, server, size, body):
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    start = len(header).to_bytes(8, "little") + header
    connection.sendall(
        f"POST /shards HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Length: {len(start) + size}\r\n\r\n".encode()
        + start
        + body
    )


def test_a_stalled_upload_gives_its_room_back():
    with (
        ShardServer(max_bytes=1 << 20, idle_timeout_s=0.5) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        upload(connection, server, 1 << 20, bytes(1000))
        assert until_end(connection).startswith(b"HTTP/1.1 408")
        backend = HttpBackend(server.url, server.token)
        backend.put([torch.zeros(1 << 20, dtype=torch.uint8)])
        assert backend.stats().shards == 1
        backend.close()


def test_a_client_that_takes_no_answer_is_let_go():
    with ShardServer(idle_timeout_s=0.5) as server:
        backend = HttpBackend(server.url, server.token)
        (shard,) = backend.put([torch.zeros(8 << 20)])
        body = json.dumps({"epoch": shard.owner, "reads": [[shard.shard_id, None, None]]})
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            head = f"POST /fetch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            was_there, deadline = False, time.monotonic() + 60
            while len(server._socket.descriptors()) > 2 or not was_there:
                assert time.monotonic() < deadline
                was_there = was_there or len(server._socket.descriptors()) > 2
                time.sleep(0.02)
        backend.close()


def test_more_than_half_of_the_memory_is_refused_by_default():
    with ShardServer() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        upload(connection, server, 1 << 42, b"")
        assert b"no room for" in until_end(connection)


HOSTILE_SHAPES = [
    [-1],
    [1 << 63, 0],
    [1 << 62, 4, 0],
    [10**30, 0],
    [1.0],
    [True],
    ["3"],
    [None],
    [0] * 100,
    [[1]],
    "x",
    None,
]


@pytest.mark.parametrize("shape", HOSTILE_SHAPES)
def test_hostile_shapes_are_bad_requests(shape):
    with ShardServer() as server:
        header = json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
        assert ask(server, "/shards", len(header).to_bytes(8, "little") + header)[0] == 400
        assert server.store.stats().shards == 0


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ({"range": [-3, -1]}, None),
        ({"range": [0, 1 << 70]}, None),
        ({"range": [2, 1]}, None),
        ({"range": [0.0, 1.0]}, None),
        ([-1], None),
        ([1 << 70], None),
        ([0.5], None),
        ([True], None),
        ([[0]], None),
        (None, [-1, 2]),
        (None, [0, 1 << 70]),
        (None, [0, 1, 2]),
        (None, ["0", "1"]),
    ],
)
def test_hostile_rows_are_bad_requests(rows, columns):
    with ShardServer() as server:
        backend = HttpBackend(server.url, server.token)
        (shard,) = backend.put([torch.ones(3, 4)])
        body = json.dumps({"epoch": shard.owner, "reads": [[shard.shard_id, rows, columns]]}).encode()
        assert ask(server, "/fetch", body)[0] == 400
        backend.close()


def ask(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, body=body, headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    made = subprocess.run(
        ["openssl", "req", "-x509", *kind, *names, *files], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate")
    return folder


def test_tls_is_checked_and_travels_with_the_backend(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with ShardServer(ssl_context=context) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = functools.partial(ssl.create_default_context, cafile=str(certificate / "cert.pem"))
        backend = HttpBackend(server.url, server.token, ssl_context=trusting)
        make, arguments = backend.__reduce__()
        (shard,) = backend.put([torch.arange(1 << 18)])
        with contextlib.closing(make(*arguments)) as copy:
            assert torch.equal(ShardRegistry(copy).fetch([RTensor(shard)])[0], torch.arange(1 << 18))
        backend.close()
        with pytest.raises(ShardLostError, match="CERTIFICATE_VERIFY_FAILED"):
            HttpBackend(server.url, server.token).stats()


def has_address_for_others():
    """Whether this machine has an address beside its loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
        return not ipaddress.ip_address(probe.getsockname()[0]).is_loopback


@pytest.mark.parametrize("host", ["::1", "::", "0.0.0.0"])
def test_ipv6_and_all_addresses(host):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        server = ShardServer(host)
    except TransportError as error:
        pytest.skip(str(error))
    with server:
        advertised = ipaddress.ip_address(urlsplit(server.url).hostname)
        assert not advertised.is_unspecified
        if host != "::1" and has_address_for_others():
            assert not advertised.is_loopback, "others are to reach it there"
        backend = HttpBackend(server.url, server.token)
        (shard,) = backend.put([torch.ones(3)])
        assert torch.equal(ShardRegistry(backend).fetch([RTensor(shard)])[0], torch.ones(3))
        backend.close()
    with ShardServer(host, advertise="a.name") as named:
        assert named.url == f"http://a.name:{named.port}"


def test_an_address_that_is_taken_is_named():
    with ShardServer() as server, pytest.raises(TransportError, match=f"listen on .* port {server.port}"):
        ShardServer(port=server.port)


def test_idle_connections_of_a_client_are_bounded():
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ShardServer(token=TOKEN)) for _ in range(20)]
        backend = HttpBackend(servers[0].url, TOKEN, servers=[server.url for server in servers])
        for server in servers:  # whose threads may not have begun yet, and each opens some
            assert ask(server, "/fetch", b"{")[0] == 400
        before = len(list(Path("/proc/self/fd").iterdir()))
        for server in servers:
            backend.release([shard_on(server.url)])
        # Each connection has an end of the client and one of a server, as both are of this process.
        assert len(backend._client._idle) <= 16
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2 * 20
        backend.close()


def test_a_forked_child_has_connections_and_a_store_of_its_own():
    with ShardServer() as server:
        backend = HttpBackend(server.url, server.token)
        (shard,) = backend.put([torch.arange(1000)])
        assert backend._client._idle
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                (got,) = ShardRegistry(backend).fetch([RTensor(shard)], timeout_s=30)
                good = torch.equal(got, torch.arange(1000)) and server.store.get(shard.shard_id) is None
                server.close()
                os.write(w, b"good" if good else b"bad")
            except BaseException as error:  # noqa: BLE001 - it is shown in the parent
                os.write(w, repr(error).encode()[:4000])
            finally:
                os._exit(0)
        os.close(w)
        try:
            for _ in range(5):
                assert torch.equal(ShardRegistry(backend).fetch([RTensor(shard)])[0], torch.arange(1000))
            assert os.read(r, 4096) == b"good"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(r)
        backend.release([shard])
        with pytest.raises(StaleHandleError):
            ShardRegistry(backend).fetch([RTensor(shard)])
        backend.close()
