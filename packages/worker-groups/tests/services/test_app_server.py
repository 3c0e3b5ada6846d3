"""An application of one's own from a thread of a process: behind its token, until it is shut down."""

import asyncio
import contextlib
import pickle
import socket
import threading
import time

import pytest
from asking import ask, is_open, told
from patience import PATIENCE_S, eventually

pytest.importorskip("uvicorn")

from raycrew.worker_groups.services import AppServer, ServiceClosedError, _asgi


async def app(scope, receive, send):
    body = b'{"path": "%s"}' % scope["path"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_an_application_is_served_behind_its_token_until_the_end():
    with AppServer(app) as server:
        endpoint = server.endpoint
        assert told(endpoint, "/here") == {"path": "/here"}
        assert ask(endpoint, "/here", told=False)[0] == 401
        with pytest.raises(TypeError, match="pass its endpoint on"):
            pickle.dumps(server)
    assert not is_open(endpoint.port)
    server.shutdown()
    with pytest.raises(ServiceClosedError):
        _ = server.endpoint


def test_it_may_be_open():
    with AppServer(app, token=None) as server:
        assert ask(server.endpoint, "/here", told=False)[0] == 200


class Waits:
    """An application whose answers never come; it notes how requests end."""

    def __init__(self, begins=False):
        self.begins, self.is_asked, self.ends = begins, threading.Event(), []

    async def __call__(self, scope, receive, send):
        if self.begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ends.append(asyncio.current_task().cancelling())


@pytest.mark.parametrize("begins", [False, True], ids=["not answered", "half answered"])
def test_requests_under_way_end_with_a_shutdown_without_an_answer(begins):
    waits = Waits(begins)
    server = AppServer(waits, token=None)
    (thread,) = [one for one in threading.enumerate() if one.name == "raycrew-http"]
    with socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=PATIENCE_S) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert waits.is_asked.wait(PATIENCE_S)
        server.shutdown()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert waits.ends == [1], "it was cancelled"
        assert not _rest(client).endswith(b"0\r\n\r\n")


def test_an_answer_that_is_complete_is_sent_to_its_end_at_a_shutdown(monkeypatch):
    monkeypatch.setattr(_asgi, "_HEAR_S", PATIENCE_S)
    is_answered, body = threading.Event(), b"a" * (16 << 20) + b"z"

    async def long(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        is_answered.set()

    server = AppServer(long, token=None)
    port = server.endpoint.port
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
        assert is_answered.wait(PATIENCE_S)
        ending = threading.Thread(target=server.shutdown)
        ending.start()
        eventually(lambda: not is_open(port), "it listens no more")
        assert _rest(client).endswith(body)
    ending.join(PATIENCE_S)


def test_a_request_that_goes_on_when_it_is_cancelled_does_not_keep_the_end_from_its_application():
    heard, is_asked = [], threading.Event()

    async def stubborn(scope, receive, send):
        if scope["type"] == "lifespan":
            for _ in range(2):
                heard.append((await receive())["type"])
                await send({"type": f"{heard[-1]}.complete"})
            return
        is_asked.set()
        until = time.monotonic() + 10
        while "lifespan.shutdown" not in heard and time.monotonic() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        heard.append("the request ends")

    server = _asgi.server_of(stubborn, websockets=False, lifespan=True, grace_s=0.1)
    with _asgi.Listener.at("127.0.0.1", 0, 10) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        eventually(lambda: server.started, "it serves")
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert is_asked.wait(PATIENCE_S)
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert heard == ["lifespan.startup", "lifespan.shutdown", "the request ends"]


def _rest(client):
    """What a server has still said before it closed the connection."""
    heard = b""
    try:
        while piece := client.recv(4096):
            heard += piece
    except ConnectionResetError:
        pass
    return heard


class Hears:
    """An application that works on a request until its client has gone away."""

    def __init__(self):
        self.is_asked, self.is_left, self.goes_on = threading.Event(), threading.Event(), threading.Event()

    async def __call__(self, scope, receive, send):
        assert (await receive())["type"] == "http.request"
        self.is_asked.set()
        if scope["path"] == "/until-told":
            await asyncio.to_thread(self.goes_on.wait, PATIENCE_S)
            await app(scope, receive, send)
        else:
            assert (await receive())["type"] == "http.disconnect"
            self.is_left.set()


@pytest.mark.hostile
@pytest.mark.parametrize("head", [b"", b"connection: close\r\n"], ids=["keeps", "closes"])
@pytest.mark.parametrize("more", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n", b"\x00" * 9])
def test_a_client_that_had_sent_more_than_its_request_is_heard_as_it_leaves(head, more):
    hears = Hears()
    with AppServer(hears, token=None) as server:
        with socket.create_connection(("127.0.0.1", server.endpoint.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
            assert hears.is_asked.wait(PATIENCE_S)
            client.sendall(more)
            assert not hears.is_left.wait(0.3)
        assert hears.is_left.wait(PATIENCE_S)


@pytest.mark.hostile
def test_what_comes_after_the_last_request_does_not_spoil_its_answer():
    hears = Hears()
    with (
        AppServer(hears, token=None) as server,
        socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=PATIENCE_S) as client,
    ):
        client.sendall(b"GET /until-told HTTP/1.1\r\nHost: x\r\nconnection: close\r\n\r\n")
        assert hears.is_asked.wait(PATIENCE_S)
        client.sendall(b"\r\n")
        hears.goes_on.set()
        assert _rest(client).startswith(b"HTTP/1.1 200")


@pytest.mark.hostile
def test_requests_that_are_sent_at_once_are_all_answered_and_no_more_is_read_than_has_room():
    hears, request = Hears(), b"GET /until-told HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        AppServer(hears, token=None) as server,
        socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=PATIENCE_S) as client,
    ):
        client.sendall(request)
        assert hears.is_asked.wait(PATIENCE_S)
        client.sendall(2 * request)
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            while True:  # more than all buffers of the sockets hold
                client.sendall(b"\r\n" * (1 << 19))
        hears.goes_on.set()
        heard = b""
        client.settimeout(PATIENCE_S)
        while heard.count(b"HTTP/1.1 200") < 3:
            piece = client.recv(4096)
            assert piece, heard
            heard += piece


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"app": "package.app:create"}, TypeError),
        ({"token": "short"}, ValueError),
        ({"max_connections": 0}, ValueError),
        ({"idle_timeout_s": 0}, ValueError),
        ({"port": 1 << 17}, ValueError),
        ({"host": 3}, TypeError),
    ],
)
def test_what_can_not_be_meant_is_refused(wrong, kind):
    with pytest.raises(kind):
        AppServer(**{"app": app, **wrong})
