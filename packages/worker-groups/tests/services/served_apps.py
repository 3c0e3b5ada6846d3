"""ASGI applications that tests have served; servers import this module by name."""

import asyncio
import json
import os
import time
from pathlib import Path


class App:
    """Answers some paths with what tests want to see."""

    def __init__(self, word="", ready_after_s=0.0):
        self.word, self.ready_at = word, time.monotonic() + ready_after_s

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        path, query = scope["path"], scope["query_string"].decode()
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        if path == "/health":
            await say(send, 200 if time.monotonic() >= self.ready_at else 503, {"is": "well"})
        elif path == "/where":
            environ = {name: os.environ.get(name, "") for name in query.split(",")}
            seen = {"word": self.word, "env": environ, "headers": headers, "cwd": str(Path.cwd())}
            await say(send, 200, {"pid": os.getpid(), **seen})
        elif path == "/nap":
            await asyncio.sleep(float(query))
            await say(send, 200, {"pid": os.getpid()})
        elif path == "/note":  # in a file, so that it is known how often it ran
            folder, name = query.split(",")
            with Path(folder, "notes").open("a") as notes:
                notes.write(f"{name}\n")
            await asyncio.sleep(0.02)
            await say(send, 200, {"name": name})
        elif path == "/events":
            await stream(send, int(query))
        elif path == "/leave":
            os._exit(3)
        else:
            await say(send, 200, {"path": path, "bytes": len(body)})


async def say(send, status, value):
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def stream(send, count):
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number in range(count):
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
        await asyncio.sleep(0.05)
    await send({"type": "http.response.body", "body": b""})


app = App("ready made")


def create():
    """Makes an application."""
    return App("made")


def late():
    """An application that is ready a moment after it listens."""
    return App("late", 0.3)


def hangs():
    """Never gives an application."""
    os.write(1, b"it hangs\n")
    time.sleep(600)


def wants_more(settings):
    """Neither an application nor a function without arguments."""


def number():
    """No application."""
    return 7
