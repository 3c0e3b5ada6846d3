"""A reward model as a web application: `POST /score` with a list of pairs gives rewards."""

import json

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


def score(prompt: str, answer: str) -> float:
    """The reward: the share of places at which the answer is the prompt reversed."""
    wanted = prompt[::-1]
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / max(len(wanted), 1)


async def health(_: Request) -> JSONResponse:
    """Say that the server is up."""
    return JSONResponse({"is": "well"})


async def rewards(request: Request) -> JSONResponse:
    """Rewards of pairs of prompt and answer."""
    try:
        pairs = [(str(prompt), str(answer)) for prompt, answer in json.loads(await request.body())]
    except (ValueError, TypeError) as error:
        return JSONResponse({"error": f"not a list of (prompt, answer): {error}"}, status_code=400)
    return JSONResponse([score(*pair) for pair in pairs])


def create() -> Starlette:
    """The application; a model would be loaded here."""
    return Starlette(routes=[Route("/health", health), Route("/score", rewards, methods=["POST"])])
