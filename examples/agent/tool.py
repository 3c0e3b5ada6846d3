"""The agents' tool as a web application: `PUT`, `POST` and `DELETE /session`, each with a header `X-Session`.

A session is an interpreter in a process of its own, and begins with a program. `POST` runs a program there
and gives its value or its error. A session that there is none of (its server was replaced, say) is 404, and
one whose interpreter has ended 410: an agent that went on with an empty one would learn from nonsense.
"""

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field

from interpreter import Answer, EndedError, Interpreter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MOST, IDLE_S = 256, 120.0


@dataclass
class Session:
    """An agent's interpreter, and when it was last used."""

    interpreter: Interpreter
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """The interpreters of one server, by the names of their sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    async def begin(self, request: Request) -> JSONResponse:
        """Start a session with a program; a name that there is begins anew."""
        name, program = request.headers["x-session"], await asked(request)
        await self._end(self._idle())
        if len(self._sessions) >= MOST:
            return JSONResponse({"error": f"there are {MOST} sessions"}, status_code=503)
        session = Session(await Interpreter.start())
        await self._end([name])
        self._sessions[name] = session
        return await self._answer(name, program)

    async def run(self, request: Request) -> JSONResponse:
        """Run a program in a session."""
        return await self._answer(request.headers["x-session"], await asked(request))

    async def end(self, request: Request) -> JSONResponse:
        """End a session, if there is one."""
        await self._end([request.headers["x-session"]])
        return JSONResponse(asdict(Answer()))

    async def _answer(self, name: str, program: str) -> JSONResponse:
        session = self._sessions.get(name)
        if session is None:
            return JSONResponse({"error": "there is no such session"}, status_code=404)
        session.used = time.monotonic()
        try:
            return JSONResponse(asdict(await session.interpreter.run(program)))
        except EndedError as error:
            return JSONResponse({"error": str(error)}, status_code=410)

    def _idle(self) -> list[str]:
        before = time.monotonic() - IDLE_S
        return [name for name, session in self._sessions.items() if session.used < before]

    async def _end(self, names: list[str]) -> None:
        found = [self._sessions.pop(name) for name in names if name in self._sessions]
        await asyncio.gather(*(session.interpreter.close() for session in found))


async def asked(request: Request) -> str:
    """The program in a request."""
    return str(json.loads(await request.body())["program"])


async def health(_: Request) -> JSONResponse:
    """Say that the server is up."""
    return JSONResponse({"is": "well"})


def create() -> Starlette:
    """The application."""
    sessions = Sessions()
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/session", sessions.begin, methods=["PUT"]),
            Route("/session", sessions.run, methods=["POST"]),
            Route("/session", sessions.end, methods=["DELETE"]),
        ]
    )
