"""The ASGI application as a user runs it: by itself, below the path of another one, for other clients."""

import asyncio
import contextlib
import json
import pickle
import socket
import threading

import pytest
import safetensors.torch
import torch

from raycrew.tensor_transport import (
    RTensor,
    ShardRegistry,
    TensorShardInfo,
    TransportError,
    TransportTimeoutError,
    clear_node,
)

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from raycrew.tensor_transport.backends._http.app import CHUNK_BYTES
from raycrew.tensor_transport.backends.http import HttpBackend, ShardServer, ShardStore, shard_app

TOKEN = "a token that is long enough"


def call(app, method, path, *pieces, headers=()):
    """Drive an ASGI application by hand; the status, and the pieces of the answer's body."""
    sent = []
    waiting = [{"type": "http.request", "body": p, "more_body": True} for p in pieces]
    waiting.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    given = [(b"authorization", f"Bearer {TOKEN}".encode()), *headers]
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "headers": given, "query_string": query.encode()}
    asyncio.run(app(scope | {"root_path": "", "http_version": "1.1", "scheme": "http"}, receive, send))
    bodies = [bytes(message.get("body", b"")) for message in sent if message["type"] == "http.response.body"]
    return sent[0]["status"], bodies


def test_answers_are_sent_in_chunks_and_requests_read_in_any_pieces():
    store = ShardStore()
    app = shard_app(store, TOKEN)
    tensor = torch.arange(3 * CHUNK_BYTES // 8 + 5)
    data = safetensors.torch.save({"s" * 32: tensor})
    pieces = [
        data[:3],
        data[3:11],
        b"",
        data[11:40],
        *(data[i : i + 99_991] for i in range(40, len(data), 99_991)),
    ]
    status, _ = call(app, "POST", "/shards?step=4", *pieces)
    assert status == 201 and torch.equal(store.get("s" * 32), tensor)
    assert store.stats().oldest_step == 4
    wanted = json.dumps({"epoch": store.epoch, "reads": [["s" * 32, None, None]]}).encode()
    status, bodies = call(app, "POST", "/fetch", wanted)
    assert status == 200 and max(map(len, bodies)) == CHUNK_BYTES and len(bodies) > 4
    assert torch.equal(safetensors.torch.load(b"".join(bodies))["0"], tensor)


@pytest.mark.parametrize("cut", [-1, 1])
def test_a_body_of_another_length_is_refused(cut):
    store = ShardStore()
    data = safetensors.torch.save({"s": torch.ones(100)})
    data = data[:cut] if cut < 0 else data + b"x" * cut
    status, (answer,) = call(shard_app(store, TOKEN), "POST", "/shards", data)
    assert status == 400 and (b"ends early" if cut < 0 else b"more bytes than") in answer
    length = [(b"content-length", str(len(data)).encode())]
    status, (answer,) = call(shard_app(store, TOKEN), "POST", "/shards", data, headers=length)
    assert status == 400 and b"that its header describes" in answer
    assert store.stats().shards == 0


def test_bytes_that_arrive_have_their_room_taken():
    """Two requests at once do not get the room of one."""
    store = ShardStore(max_bytes=1000)
    with (
        store.room_for(600),
        pytest.raises(TransportError, match=r"no room for 600 bytes: 600 of max_bytes=1000"),
    ):
        store.room_for(600).__enter__()
    with store.room_for(1000):
        pass


def test_mounted_below_a_path_of_another_application():
    store = ShardStore()
    routes = [
        Route("/", lambda request: PlainTextResponse("theirs")),
        Mount("/tensors", shard_app(store, TOKEN)),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    backend = HttpBackend(f"http://127.0.0.1:{listener.getsockname()[1]}/tensors/", TOKEN)
    registry = ShardRegistry(backend)
    handles = registry.put([torch.arange(12).reshape(3, 4)], step=1)
    assert torch.equal(
        registry.fetch([pickle.loads(pickle.dumps(handles[0]))[1:]])[0], torch.arange(4, 12).reshape(2, 4)
    )
    assert backend.stats().shards == 1 == registry.expire(2)
    registry.release([handles[0].shard])
    assert store.stats().shards == 0
    backend.close()
    server.should_exit = True
    thread.join(60)
    listener.close()
    assert not thread.is_alive()


def test_no_pickle_is_read_from_the_wire(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("something was unpickled")

    with ShardServer() as server:
        backend = HttpBackend(server.url, server.token)
        registry = ShardRegistry(backend)
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, refuse)
        monkeypatch.setattr(torch, "load", refuse)
        (handle,) = registry.put([torch.ones(5, 3, dtype=torch.bfloat16)], step=1)
        assert registry.fetch([handle[[4, 0], 1:2]])[0].tolist() == [[1.0], [1.0]]
        assert backend.stats().shards == 1
        registry.release([handle.shard])
        assert backend.expire(9) == 0
        monkeypatch.undo()
        backend.close()


def test_one_request_for_each_server_and_all_at_once(monkeypatch):
    with ShardServer() as first, ShardServer(token=first.token) as second:
        urls = [first.url, second.url]
        backends = [HttpBackend(url, first.token, servers=urls) for url in urls]
        handles = [
            RTensor(shard)
            for backend in backends
            for shard in backend.put([torch.full((4, 2), value) for value in range(20)])
        ]
        requests, both = [], threading.Barrier(2)
        fetch_from = HttpBackend._fetch_from

        def meet(backend, reads, timeout_s):
            requests.append(len(reads))
            both.wait(60)  # Breaks unless the other server is asked meanwhile.
            return fetch_from(backend, reads, timeout_s)

        monkeypatch.setattr(HttpBackend, "_fetch_from", meet)
        order = torch.randperm(40 * 4)
        (got,) = ShardRegistry(backends[0]).fetch([RTensor.concat(handles).reorder(order)])
        whole = torch.arange(20).repeat(2).repeat_interleave(4)
        assert torch.equal(got[:, 0], whole[order])
        assert requests == [20, 20]
        for backend in backends:
            backend.close()


def test_a_server_is_cleared_as_a_node():
    with ShardServer() as server:
        registry = ShardRegistry(HttpBackend(server.url, server.token))
        handle, *_ = registry.put([torch.ones(3), torch.ones(4)])
        assert clear_node(handle.shard.node_id, registry) == 2
        assert registry.stats()["http"].shards == 0
        with pytest.raises(
            TransportError, match=rf"no backend keeps a store on node 'x'.*http: 127.0.0.1:{server.port}"
        ):
            clear_node("x", registry)
        registry.close()


def test_an_answer_that_trickles_in_has_a_deadline():
    size = 1 << 30
    header = json.dumps({"0": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    over = threading.Event()

    def trickle(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {8 + len(header) + size}\r\n\r\n".encode()
            connection.sendall(head + len(header).to_bytes(8, "little") + header)
            while not over.wait(0.01):
                connection.sendall(bytes(100_000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=trickle, args=(listener,), daemon=True)
        server.start()
        backend = HttpBackend(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN)
        shard = TensorShardInfo("http", "s" * 32, "epoch", "node", "uint8", (size,), backend._url)
        with pytest.raises(TransportTimeoutError, match="no answer in"):
            ShardRegistry(backend).fetch([RTensor(shard)], timeout_s=0.5)
        over.set()
        server.join(60)
