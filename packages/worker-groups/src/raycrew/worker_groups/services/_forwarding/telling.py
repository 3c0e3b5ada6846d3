"""The answer to a request that has none."""

from contextlib import suppress

from raycrew.worker_groups.services._asgi import Send, answer


async def tell(send: Send, status: int, message: str, outcome: str) -> None:
    """Say why there is no answer, and whether the request has run; what is left of it is not read."""
    headers = {"connection": "close", "x-raycrew-outcome": outcome.replace(" ", "-")}
    with suppress(OSError):
        await answer(send, status, {"error": message, "outcome": outcome}, headers)
