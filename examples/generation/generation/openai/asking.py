"""What a client's JSON asks for: read field by field, and refused where it means nothing here. Pure.

A field that would change the answer and is not supported is refused unless it says what holds anyway; one
that is unknown is refused, too: nobody is given something else than he has asked for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from generation.errors import SamplingError
from generation.openai.errors import wrong
from generation.sampling import Sampling

Kind = Literal["completions", "chat/completions"]

MOST_N = 128
MOST_STOPS = 16
LONGEST_STOP = 256
SAMPLING = ("n", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos")
#: Fields of both kinds that tell who asks, and change nothing.
NOTES = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
#: Values of fields that are not supported which say what holds anyway.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
NEUTRAL_OF: Mapping[Kind, Mapping[str, Sequence[Any]]] = {
    "completions": {"best_of": (1,), "echo": (False,), "suffix": ("",)},
    "chat/completions": {
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
    },
}
OWN: Mapping[Kind, Sequence[str]] = {
    "completions": ("prompt", "max_tokens", "logprobs"),
    "chat/completions": ("messages", "max_tokens", "max_completion_tokens", "logprobs"),
}
BOTH = ("model", "stream", "stream_options", "stop", "return_token_ids", *SAMPLING)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for.

    Attributes:
        kind: Which of the two.
        model: What is to answer.
        prompts: Text, or ids of tokens; for a chat empty.
        messages: Of a chat.
        sampling: How tokens are chosen; without a limit of tokens in `max_tokens`, where that is None.
        max_tokens: Most tokens of a sample; None for what fits the context.
        stops: Strings that end a sample.
        streams: Whether the answer comes in pieces.
        wants_usage: Whether a stream ends with counts.
        wants_logprobs: Whether log-probabilities are told.
        wants_ids: Whether ids of tokens are told, those of prompts too.
    """

    kind: Kind
    model: str
    prompts: Sequence[str | Sequence[int]]
    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling
    max_tokens: int | None
    stops: Sequence[str]
    streams: bool
    wants_usage: bool
    wants_logprobs: bool
    wants_ids: bool


def read(kind: Kind, body: bytes) -> Ask:
    """What a request's body asks for.

    Raises:
        ApiError: It is no JSON object, or has a field that can't be meant.
    """
    fields = _fields(body)
    _check_known(kind, fields)
    stream = _typed(fields, "stream", bool, False)
    most = _limit(kind, fields)
    return Ask(
        kind,
        _required(fields, "model", str),
        _prompts(fields) if kind == "completions" else (),
        _messages(fields) if kind == "chat/completions" else (),
        _sampling(fields, most),
        most,
        _stops(fields.get("stop")),
        stream,
        _wants_usage(fields, stream),
        _wants_logprobs(kind, fields),
        _typed(fields, "return_token_ids", bool, False),
    )


def _fields(body: bytes) -> dict[str, Any]:
    """The fields that are not null: null says the same as no field."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise wrong(None, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise wrong(None, "the body is no JSON object")
    return {name: value for name, value in found.items() if value is not None}


def _check_known(kind: Kind, fields: Mapping[str, Any]) -> None:
    neutral = {**NEUTRAL, **NEUTRAL_OF[kind]}
    for name, value in fields.items():
        if name in neutral:
            if not any(value == one and type(value) in (type(one), float) for one in neutral[name]):
                raise wrong(name, f"{name}={_shown(value)} is not supported here", "unsupported_value")
        elif name not in (*BOTH, *OWN[kind], *NOTES):
            raise wrong(name, f"there is no field {_shown(name)}", "unknown_parameter")


def _sampling(fields: Mapping[str, Any], most: int | None) -> Sampling:
    told = {name: fields[name] for name in SAMPLING if name in fields}
    stops = told.get("stop_token_ids", [])
    if not isinstance(stops, list) or len(stops) > MOST_N:
        raise wrong("stop_token_ids", f"stop_token_ids are a list of up to {MOST_N} ids")
    if not isinstance(told.get("ignore_eos", False), bool):
        raise wrong("ignore_eos", "ignore_eos is true or false")
    try:
        found = Sampling.of({**told, **({} if most is None else {"max_tokens": most})})
    except SamplingError as error:
        message = str(error)  # begins with the name
        raise wrong(
            next((name for name in SAMPLING if message.startswith(f"{name} ")), None), message
        ) from None
    if found.n > MOST_N:
        raise wrong("n", f"n is {found.n}; {MOST_N} samples are the most")
    return found


def _limit(kind: Kind, fields: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    for name in names:
        value = fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(name, f"{name} must be a whole number of at least 1, not {_shown(value)}")
    if len({fields[name] for name in names}) > 1:
        raise wrong("max_tokens", "max_tokens and max_completion_tokens say two things")
    return fields[names[0]] if names else 16 if kind == "completions" else None


def _prompts(fields: Mapping[str, Any]) -> Sequence[str | Sequence[int]]:
    prompt = _required(fields, "prompt", (str, list))
    if isinstance(prompt, str):
        found: list[Any] = [prompt]
    elif prompt and all(_is_id(one) for one in prompt):
        found = [prompt]
    else:
        found = prompt
    for one in found:
        if isinstance(one, str):
            _check_text("prompt", one)
        elif not isinstance(one, list) or not one or not all(_is_id(token) for token in one):
            raise wrong("prompt", "a prompt is a string, a list of strings, or of ids, or of lists of ids")
    if not found:
        raise wrong("prompt", "there is no prompt")
    return found


def _messages(fields: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = _required(fields, "messages", list)
    if not messages:
        raise wrong("messages", "there are no messages")
    return [_message(at, message) for at, message in enumerate(messages)]


def _message(at: int, message: Any) -> dict[str, str]:
    where = f"messages[{at}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong(where, f"{where} has no role")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in (None, []):
            raise wrong(f"{where}.{name}", f"{where}.{name} is not supported here", "unsupported_value")
    told = {"role": message["role"], "content": _content(where, message.get("content"))}
    if (name := message.get("name")) is not None:
        if not isinstance(name, str):
            raise wrong(f"{where}.name", f"{where}.name is a string")
        told["name"] = name
    for text in told.values():
        _check_text(where, text)
    return told


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise wrong(f"{where}.content", f"{where}.content is text, or a list of parts of the type 'text'")


def _stops(stop: Any) -> Sequence[str]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or len(found) > MOST_STOPS:
        raise wrong("stop", f"stop is a string, or a list of up to {MOST_STOPS}")
    for one in found:
        if not isinstance(one, str) or not one:
            raise wrong("stop", "stop has what is no string, or an empty one")
        if len(one) > LONGEST_STOP:
            raise wrong("stop", f"stop has a string of {len(one)} characters; {LONGEST_STOP} are the most")
        _check_text("stop", one)
    return found


def _wants_usage(fields: Mapping[str, Any], stream: bool) -> bool:
    told = _typed(fields, "stream_options", dict, {})
    if told and not stream:
        raise wrong("stream_options", "stream_options are for stream=true")
    if unknown := told.keys() - {"include_usage", "include_obfuscation"}:
        raise wrong("stream_options", f"stream_options have no {_shown(min(unknown))}", "unknown_parameter")
    return _typed(told, "include_usage", bool, False)


def _wants_logprobs(kind: Kind, fields: Mapping[str, Any]) -> bool:
    if kind == "chat/completions":
        return _typed(fields, "logprobs", bool, False)
    if "logprobs" not in fields:
        return False
    if (count := fields["logprobs"]) != 0 or isinstance(count, bool):
        raise wrong(
            "logprobs",
            f"logprobs={_shown(count)}: those of chosen tokens alone are known, which logprobs=0 tells",
            "unsupported_value",
        )
    return True


def _required(fields: Mapping[str, Any], name: str, kinds: Any) -> Any:
    if name not in fields:
        raise wrong(name, f"{name} is missing", "missing_required_parameter")
    return _typed(fields, name, kinds, None)


def _typed(fields: Mapping[str, Any], name: str, kinds: Any, default: Any) -> Any:
    value = fields.get(name, default)
    if name in fields and (not isinstance(value, kinds) or (kinds is not bool and isinstance(value, bool))):
        raise wrong(name, f"{name} can't be {_shown(value)}", "invalid_type")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_text(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong(param, f"{param} has half a character, which is no text") from None


def _shown(value: Any) -> str:
    """What a client has sent, as far as it fits a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
