"""The endpoint of one generator, as an application of ASGI."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from generation.calls import Asked, admitted, forget, progress_of
from generation.engine import Request
from generation.errors import EngineFailedError, RefusedError
from generation.life import EngineLife
from generation.loop import EngineLoop
from generation.openai.answers import Answer, usage_of
from generation.openai.asking import Ask, Kind, read
from generation.openai.choices import Choice, Part, is_told, joined
from generation.openai.errors import ApiError, no_engine, no_model, told_of, wrong
from generation.openai.options import EndpointOptions
from generation.openai.replying import ClientGoneError, Message, Receive, Reply, Send, body_of, unless_gone
from generation.samples import Added

logger = logging.getLogger(__name__)

KINDS: Mapping[str, Kind] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat/completions",
}


class Text(Protocol):
    """What makes tokens of text, and text of tokens; used by several threads."""

    def prompts(self, ask: Ask) -> list[list[int]]:
        """Ids of each prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        ...


class OpenAiApp:
    """Answers in OpenAI's form what one generator makes.

    Args:
        life: The generator's engine.
        text: Its tokenizer.
        options: What the endpoint is to be.
    """

    def __init__(self, life: EngineLife, text: Text, options: EndpointOptions) -> None:
        self._life, self._text, self._options = life, text, options

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reply = Reply(send)
        try:
            body = await body_of(receive, self._options.max_body_bytes)
            await unless_gone(receive, self._answer(scope["method"], scope["path"], body, reply))
        except ClientGoneError:
            return
        except Exception as error:
            told = told_of(error)
            if told.status == 500:
                logger.exception("a request was not answered")
            await reply.fail(told)

    async def _answer(self, method: str, path: str, body: bytes, reply: Reply) -> None:
        known = "POST" if path in KINDS else "GET"
        found = None if path in KINDS else self._told(path)
        if method != known:
            raise ApiError(405, f"{path} is asked by {known}", code="method_not_supported")
        if found is None:
            await self._generate(KINDS[path], body, reply)
        else:
            await reply.whole(found)

    def _told(self, path: str) -> dict[str, Any]:
        if path == "/health":
            awake = self._life.awake
            awake.loop.check_failed()
            return {"weight_version": awake.version()}
        state = self._life.state
        names = [self._options.model_name, *(() if state is None else state.loop.engine.adapters)]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "raycrew"} for name in names]
        if path == "/v1/models":
            return {"object": "list", "data": models}
        if path.startswith("/v1/models/"):
            if (asked := path.removeprefix("/v1/models/")) not in names:
                raise no_model(asked)
            return models[names.index(asked)]
        raise ApiError(404, f"there is no {path}", code="unknown_url")

    async def _generate(self, kind: Kind, body: bytes, reply: Reply) -> None:
        ask, prompts = await asyncio.to_thread(self._read, kind, body)
        loop, requests = await self._admitted(ask, prompts)
        choices = {
            request.id: Choice(index, request.prompt, self._text.decode, ask.stops)
            for index, request in enumerate(requests)
        }
        answer = Answer.to(ask)
        async with contextlib.aclosing(_parts(loop, requests, choices)) as parts:
            if ask.streams:
                await _tell_pieces(answer, parts, reply)
            else:
                found = await _collected(parts)
        usage = usage_of(prompts, [choice.count for choice in choices.values()])
        if not ask.streams:
            await reply.whole(answer.whole(found, usage))
            return
        if ask.wants_usage:
            await reply.event(answer.usage(usage))
        await reply.end()

    def _read(self, kind: Kind, body: bytes) -> tuple[Ask, list[list[int]]]:
        """What is asked for, and the ids of its prompts; both may take a while."""
        ask, most = read(kind, body), self._options.max_samples
        if (count := max(1, len(ask.prompts)) * ask.sampling.n) > most:
            raise wrong("n", f"{count} samples are asked for; {most} are the most")
        prompts = self._text.prompts(ask)
        longest, room = max(map(len, prompts)), self._life.limits.context_length
        if longest >= room:
            raise wrong(
                "messages" if ask.messages else "prompt",
                f"the prompt has {longest} tokens, and the context of {room} has to hold one more",
                "context_length_exceeded",
            )
        return ask, prompts

    async def _admitted(
        self, ask: Ask, prompts: Sequence[Sequence[int]]
    ) -> tuple[EngineLoop, Sequence[Request]]:
        adapter = None if ask.model == self._options.model_name else ask.model
        most = self._life.limits.context_length if ask.max_tokens is None else ask.max_tokens
        sampling = replace(ask.sampling, max_tokens=most)
        try:
            self._life.awake.loop.check_failed()
            return await admitted(self._life, Asked({"prompt_ids": prompts}, sampling, None, adapter))
        except RefusedError:
            raise no_model(ask.model) from None
        except EngineFailedError as error:
            raise no_engine(error) from error


async def _parts(
    loop: EngineLoop, requests: Sequence[Request], choices: Mapping[str, Choice]
) -> AsyncGenerator[Part, None]:
    """What is added to choices until all have ended; one that a string ended is generated no further."""
    async with contextlib.aclosing(progress_of(loop, requests)) as progress:
        async for request, found in progress:
            choice = choices[request.id]
            if choice.is_done:
                continue
            if not isinstance(found, Added):
                yield choice.end(found.finish_reason)
                continue
            yield choice.add(found)
            if choice.is_done:
                forget(loop, [request])


async def _collected(parts: AsyncIterator[Part]) -> list[Part]:
    """Each choice as one part."""
    found: dict[int, list[Part]] = defaultdict(list)
    async for part in parts:
        found[part.index].append(part)
    return [joined(found[index]) for index in sorted(found)]


async def _tell_pieces(answer: Answer, parts: AsyncIterator[Part], reply: Reply) -> None:
    opened: set[int] = set()
    unsaid: dict[int, list[Part]] = defaultdict(list)
    async for part in parts:
        unsaid[part.index].append(part)
        if not is_told(part, answer.ask):
            continue
        if answer.ask.kind == "chat/completions" and part.index not in opened:
            opened.add(part.index)
            await reply.event(answer.opening(part.index))
        await reply.event(answer.piece(joined(unsaid.pop(part.index))))
