"""Shards over HTTP against a raw socket, and against base64 in JSON."""

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from data_plane import MIB, check, content
from harness import Figure, ratio, seconds
from raycrew.tensor_transport import ShardRegistry
from raycrew.tensor_transport.backends.http import HttpBackend, ShardServer


@contextmanager
def raw_socket(data: np.ndarray) -> Iterator[Callable[[np.ndarray], None]]:
    """A thread that sends `data` to whoever asks, and the asking."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    while connection.recv(1):
                        connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    client = socket.create_connection(listener.getsockname())

    def receive(target: np.ndarray) -> None:
        client.send(b"x")
        view = memoryview(target)
        while len(view):
            view = view[client.recv_into(view) :]

    yield receive
    client.close()
    listener.close()


def over_http(quick: bool) -> list[Figure]:
    size = (32 if quick else 128) * MIB
    tensor = content(size)
    target = torch.zeros_like(tensor)
    with ShardServer() as server, raw_socket(tensor.numpy()) as receive:
        backend = HttpBackend(server.url, server.token)
        registry = ShardRegistry(backend)
        handle = registry.put([tensor])[0]

        def checked(taken: float) -> float:
            check(torch.equal(target, tensor), "what arrived over HTTP, a socket or as JSON")
            target.zero_()
            return taken

        def ours() -> float:
            return checked(seconds(lambda: registry.fetch([handle], into=[target])))

        def plain() -> float:
            return checked(seconds(lambda: receive(target.numpy())))

        def as_json() -> float:
            start = time.perf_counter()
            text = json.dumps({"data": base64.b64encode(tensor.numpy().tobytes()).decode()}).encode()
            received = np.empty(len(text), np.uint8)
            with raw_socket(np.frombuffer(text, np.uint8)) as fetch:
                fetch(received)
            raw = base64.b64decode(json.loads(received.tobytes())["data"])
            target.numpy()[:] = np.frombuffer(raw, np.uint8)
            return checked(time.perf_counter() - start)

        figures = []
        for name, other, goal, baseline in (
            ("over a raw socket", plain, 0.3, "recv_into the same memory"),
            ("over base64 in JSON", as_json, 10, "base64 in JSON over a raw socket"),
        ):
            figures.append(
                ratio(
                    f"HTTP: get {size // MIB} MiB, speed {name}",
                    ours,
                    other,
                    baseline=baseline,
                    goal=goal,
                    better="higher",
                    repeat=3 if quick else 7,
                    invert=True,
                )
            )
        backend.close()
    return figures
