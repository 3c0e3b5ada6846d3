import contextlib
import gc
import http.client
import itertools
import json
import socket
import threading
import time
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ProcessPeer

from raycrew.tensor_transport import (
    RTensor,
    ShardLostError,
    ShardRead,
    ShardRegistry,
    StaleHandleError,
    TransportError,
)
from raycrew.tensor_transport._bytes import frame, header_length, parse_header
from raycrew.tensor_transport.errors import DecodeError, TransportClosedError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import ShardBackend
from raycrew.tensor_transport.testing import BackendCase, check_shard_backend, put_rows
from raycrew.tensor_transport.testing._conformance import cancelled_after

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from raycrew.tensor_transport.backends.http import HttpBackend, ShardServer, ShardStore


@pytest.fixture
def server():
    with ShardServer() as found:
        yield found


@pytest.fixture
def backend(server):
    found = HttpBackend(server.url, server.token)
    yield found
    found.close()


def ask(server, method, path, body=b"", token=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {server.token if token is None else token}"}
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_conforms():
    servers = [ShardServer()]
    backend = HttpBackend(servers[0].url, servers[0].token)

    def restart():
        servers[-1].close()
        servers.append(ShardServer(port=servers[0].port, token=servers[0].token))

    @contextlib.contextmanager
    def stall(_peer, shards):
        gate, store = threading.Event(), servers[-1].store
        store.get = lambda shard_id: gate.wait(120) and ShardStore.get(store, shard_id)
        try:
            yield shards
        finally:
            gate.set()
            del store.get

    check_shard_backend(BackendCase(backend, lambda: ProcessPeer(backend), True, True, restart, stall))
    assert isinstance(backend, ShardBackend)
    backend.close()
    servers[-1].close()


@pytest.mark.smoke
def test_only_the_wanted_rows_are_sent(server, backend):
    (shard,) = backend.put([torch.arange(1 << 20).reshape(1024, 1024)])
    body = json.dumps({"epoch": shard.owner, "reads": [[shard.shard_id, {"range": [3, 5]}, [0, 8]]]})
    status, data = ask(server, "POST", "/fetch", body.encode())
    assert status == 200 and len(data) < 1000
    tensors = safetensors.torch.load(data)
    assert tensors["0"].tolist() == [list(range(3072, 3080)), list(range(4096, 4104))]


def test_safetensors_written_elsewhere_are_understood(server, backend):
    data = safetensors.torch.save({"a" * 32: torch.eye(3, dtype=torch.bfloat16), "b" * 32: torch.ones(2)})
    status, answer = ask(server, "POST", "/shards", data)
    assert status == 201 and json.loads(answer)["epoch"] == server.store.epoch
    assert torch.equal(server.store.get("a" * 32), torch.eye(3, dtype=torch.bfloat16))


def test_a_token_is_needed_except_for_health(server):
    assert ask(server, "GET", "/health", token="") == (
        200,
        json.dumps({"epoch": server.store.epoch}).replace(" ", "").encode(),
    )
    for method, path in (("GET", "/stats"), ("POST", "/fetch"), ("DELETE", "/shards"), ("POST", "/shards")):
        assert ask(server, method, path, token="wrong")[0] == 401
        assert ask(server, method, path, token="")[0] == 401
    wrong = HttpBackend(server.url, "wrong" * 8)
    with pytest.raises(TransportError, match=r"401.*wrong or missing token"):
        wrong.stats()
    with pytest.raises(ValueError, match="at least 16"):
        ShardServer(token="short")


def test_bad_requests_are_answered_and_change_nothing(server, backend):
    (shard,) = backend.put([torch.ones(3, 4)])
    whole = safetensors.torch.save({"x": torch.ones(100)})
    for body in (b"{", b"[]", b'{"reads": 3}', b'{"reads": [[1, 2]]}'):
        assert ask(server, "POST", "/fetch", body)[0] == 400, body
    for rows, columns in (([9], None), ("x", None), (None, [0]), ({"range": ["a", 1]}, None), ([[1]], "q")):
        body = json.dumps({"epoch": shard.owner, "reads": [[shard.shard_id, rows, columns]]}).encode()
        assert ask(server, "POST", "/fetch", body)[0] == 400, body
    assert ask(server, "POST", "/expire", b'{"before_step": "1"}')[0] == 400
    assert ask(server, "POST", "/shards?step=x", whole)[0] == 400
    assert ask(server, "POST", "/shards", b"\x80\x04pickle")[0] == 400
    assert ask(server, "POST", "/shards", whole[:-4])[0] == 400
    assert ask(server, "GET", "/fetch")[0] == 405
    assert backend.stats().shards == 1


def test_limits_are_named():
    with ShardServer(max_bytes=1000) as server:
        backend = HttpBackend(server.url, server.token)
        with pytest.raises(TransportError, match=r"507.*no room"):
            backend.put([torch.zeros(1000)])
        backend.close()
        with pytest.raises(TransportClosedError):
            backend.stats()
    with pytest.raises(ValueError, match="http://host:port"):
        HttpBackend("localhost:80", "t")


def test_a_dead_server_is_named(server, backend):
    shards = put_rows(backend, 1)
    server.close()
    with pytest.raises(ShardLostError, match="cannot be reached") as caught:
        ShardRegistry(backend).fetch([RTensor(shards[0])])
    assert caught.value.node_id == f"127.0.0.1:{server.port}" and caught.value.shard_id == shards[0].shard_id
    backend.release(shards)


def test_reads_from_several_servers_at_once(server, backend):
    with ShardServer(token=server.token) as other:
        elsewhere = HttpBackend(other.url, other.token)
        backend = HttpBackend(server.url, server.token, servers=[other.url])
        handles = [RTensor(s) for s in backend.put([torch.ones(3, 2)]) + elsewhere.put([torch.zeros(2, 2)])]
        (got,) = ShardRegistry(backend).fetch([RTensor.concat(handles)])
        assert got.sum() == 6 and got.shape == (5, 2)
        ShardRegistry(backend).release([handle.shard for handle in handles])
        assert elsewhere.stats().shards == backend.stats().shards == 0
        elsewhere.close()
        backend.close()


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connections_to(port):
    """How many connections a server on a port of this machine has."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established, closed_by_client = "01", "08"
    return sum(
        line[1].endswith(f":{port:04X}") and line[3] in (established, closed_by_client) for line in lines
    )


@contextlib.contextmanager
def slow_reader(server, shard):
    """A connection over which a shard is asked for, and of whose answer only the first bytes were read."""
    body = json.dumps({"epoch": shard.owner, "reads": [[shard.shard_id, None, None]]})
    head = f"POST /fetch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        yield connection


def test_a_slow_reader_holds_nobody_up_and_has_its_bytes(server, backend):
    large = torch.arange(4 << 20)
    (shard,) = backend.put([large])
    with slow_reader(server, shard) as connection:
        assert torch.equal(ShardRegistry(backend).fetch([RTensor(shard)])[0], large)
        backend.release([shard])
        backend.put([torch.zeros_like(large)])
        answer = bytearray()
        while len(answer) < large.nbytes or not answer.endswith(large[-100:].numpy().tobytes()):
            piece = connection.recv(1 << 20)
            assert piece
            answer += piece
    assert answer[-large.nbytes :] == large.numpy().tobytes()


def test_an_abandoned_read_frees_what_it_held(server, backend):
    (shard,) = backend.put([torch.zeros(4 << 20)])
    stored = weakref.ref(server.store.get(shard.shard_id))
    with slow_reader(server, shard):
        backend.release([shard])
        assert backend.stats().held_bytes == 0
    wait_for(lambda: gc.collect() is not None and stored() is None)


def test_reads_cancelled_anywhere_leave_nothing(server, backend):
    tensors = [torch.full((1 << 20,), value) for value in range(3)]
    shards = backend.put(tensors)
    stored = [weakref.ref(server.store.get(shard.shard_id)) for shard in shards]
    cancelled = 0
    for attempt in itertools.count():
        try:
            with cancelled_after(attempt % 60 * 5e-4):
                backend.fetch([ShardRead(shard) for shard in shards])
        except KeyboardInterrupt:
            cancelled += 1
        if cancelled >= 20:
            break
    found = backend.fetch([ShardRead(shard) for shard in shards])
    assert all(map(torch.equal, found, tensors))
    wait_for(lambda: gc.collect() is not None and connections_to(server.port) <= 1)
    backend.release(shards)
    wait_for(lambda: gc.collect() is not None and not any(ref() is not None for ref in stored))


def test_a_dtype_without_a_name_is_refused(backend):
    with pytest.raises(UnsupportedTensorError, match="complex128"):
        backend.put([torch.zeros(2, dtype=torch.complex128)])


def test_a_stale_handle_says_why(server, backend):
    (shard,) = backend.put([torch.ones(2)])
    backend.release([shard])
    with pytest.raises(StaleHandleError, match="it was released"):
        ShardRegistry(backend).fetch([RTensor(shard)])


@settings(max_examples=200)
@given(st.data())
def test_damaged_headers_are_refused_or_harmless(data):
    start, _ = frame({"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.bool)})
    assert [entry.name for entry in parse_header(start[8:])] == ["a", "b"]
    damaged = bytearray(start)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        length = header_length(bytes(damaged[:8]))
        entries = parse_header(bytes(damaged[8 : 8 + length]))
    except DecodeError:
        return
    assert all(entry.size_bytes >= 0 for entry in entries)
