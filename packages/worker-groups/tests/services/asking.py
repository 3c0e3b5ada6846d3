"""Requests of the tests, and servers that answer them as they are told."""

import http.client
import json
import socket
import threading
from contextlib import contextmanager


def ask(endpoint, path, method="GET", body=None, headers=None, timeout=30, told=True):
    """Status, headers and body of an answer; told: whether the server is told the token."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout)
    try:
        own = dict(endpoint.headers) if told else {}
        connection.request(method, path, body=body, headers=own | (headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def told(endpoint, path, **options):
    """The JSON of an answer of 200."""
    status, _, body = ask(endpoint, path, **options)
    assert status == 200, (status, body)
    return json.loads(body)


def is_open(port, host="127.0.0.1"):
    """Whether anybody accepts connections on a port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def head_of(connection):
    """Read the head of a request, and of its body what has come with it."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        piece = connection.recv(65536)
        if not piece:
            return heard
        heard += piece
    return heard


@contextmanager
def serving(answer):
    """A server on loopback that calls a function with each connection; gives its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=run, args=(connection,), daemon=True).start()

    def run(connection):
        with connection:
            answer(connection)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
