"""One call of a generator: the requests that it becomes, and their samples as they end."""

import asyncio
import contextlib
import hashlib
import itertools
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from generation.engine import Request
from generation.errors import AsleepError
from generation.life import EngineLife
from generation.loop import EngineLoop
from generation.prompts import Limits, check_stops, read_prompts
from generation.samples import Added, Sample
from generation.sampling import Sampling

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks for.

    Attributes:
        batch: Prompts.
        sampling: How tokens are chosen.
        request_id: What `abort` calls it.
        adapter: A loaded adapter.
    """

    batch: Mapping[str, Any]
    sampling: Sampling
    request_id: str | None
    adapter: str | None


def requests_of(asked: Asked, limits: Limits) -> list[Request]:
    """A request for each sample, those of a prompt side by side.

    Raises:
        PromptError: The model can't take a prompt.
        SamplingError: Its vocabulary lacks an id that is to stop a sample.
    """
    prompts, call, sampling = read_prompts(asked.batch, limits), asked.request_id, asked.sampling
    check_stops(sampling, limits)
    call = uuid.uuid4().hex if call is None else call
    return [
        Request(
            str(next(_numbers)),
            call,
            prompt.index,
            number,
            prompt.tokens,
            replace(sampling, n=1, seed=None),
            None if sampling.seed is None else _seed_of(sampling.seed, prompt.index, number),
            min(sampling.max_tokens, limits.context_length - len(prompt.tokens)),
            asked.adapter,
        )
        for prompt in prompts
        for number in range(sampling.n)
    ]


async def admitted(life: EngineLife, asked: Asked) -> tuple[EngineLoop, list[Request]]:
    """The requests of a call that may be generated, and who generates them.

    Raises:
        PromptError: The model can't take a prompt.
        SamplingError: Its vocabulary lacks an id that is to stop a sample.
        RefusedError: There is no such adapter.
        AsleepError: There is no engine now.
        StaleWeightsError: It holds no version of the weights, or a mixture.
    """
    state = life.awake
    requests = requests_of(asked, life.limits)
    life.check_weights()
    if asked.adapter is not None:
        await asyncio.wrap_future(state.loop.call(state.loop.engine.check_adapter, asked.adapter))
    return state.loop, requests


async def samples_of(
    loop: EngineLoop, requests: Sequence[Request]
) -> AsyncGenerator[tuple[Request, Sample], None]:
    """Have samples made, and give them as they end; whoever stops early aborts the rest."""
    async with contextlib.aclosing(_events_of(loop, requests, in_pieces=False)) as events:
        async for request, found in events:
            if isinstance(found, Sample):
                yield request, found


async def progress_of(
    loop: EngineLoop, requests: Sequence[Request]
) -> AsyncGenerator[tuple[Request, Added | Sample], None]:
    """The same with what is added to each as it comes, before the sample itself."""
    async with contextlib.aclosing(_events_of(loop, requests, in_pieces=True)) as events:
        async for event in events:
            yield event


def forget(loop: EngineLoop, requests: Sequence[Request]) -> None:
    """End requests whose samples nobody waits for any more."""
    with contextlib.suppress(AsleepError):  # then they have ended with their engine
        loop.discard(requests)


async def _events_of(
    loop: EngineLoop, requests: Sequence[Request], *, in_pieces: bool
) -> AsyncGenerator[tuple[Request, Added | Sample], None]:
    inbox = _Inbox()
    left = {request.id: request for request in requests}
    try:
        await asyncio.wrap_future(loop.submit(requests, inbox.put, inbox.put if in_pieces else None))
        while left:
            for request, found in await inbox.take():
                if isinstance(found, BaseException):
                    del left[request.id]
                    raise found
                if isinstance(found, Sample):
                    del left[request.id]
                yield request, found
    finally:
        if left:
            forget(loop, list(left.values()))


class _Inbox:
    """From the engine's thread to the event loop, which is woken once for all that a step gives."""

    def __init__(self) -> None:
        self._loop, self._there = asyncio.get_running_loop(), asyncio.Event()
        self._found: deque[tuple[Request, Added | Sample | BaseException]] = deque()
        self._is_waking = False

    def put(self, request: Request, found: Added | Sample | BaseException) -> None:
        """Leave something, from any thread."""
        self._found.append((request, found))
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._wake)

    async def take(self) -> list[tuple[Request, Added | Sample | BaseException]]:
        """What is there, once there is something."""
        await self._there.wait()
        self._there.clear()
        return [self._found.popleft() for _ in range(len(self._found))]

    def _wake(self) -> None:
        self._is_waking = False  # first: what is left from here on wakes again
        self._there.set()


def _seed_of(seed: int, prompt: int, sample: int) -> int:
    """The same on each worker, and others for each sample."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
