"""A tokenizer that is made on the spot, and whoever asks an endpoint: for tests."""

import http.client
import json
import time
from contextlib import closing, contextmanager

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:!"
SPECIAL = ("<pad>", "<end>", "<unk>", "<user>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'nobody' %}{{ raise_exception('nobody may speak') }}{% endif %}"
    "<user>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def save_tokenizer(folder, size=61):
    """Have each letter be a token; as many tokens as a model has."""
    tokens = [*SPECIAL, *LETTERS][:size]
    model = WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>"],
        chat_template=TEMPLATE,
    )
    made.save_pretrained(str(folder))
    return str(folder)


def ask(endpoint, path, body=None, raw=None, method=None):
    """Status and JSON of an answer."""
    with opened(endpoint, path, body, raw, method) as answer:
        return answer.status, json.loads(answer.read())


def told(endpoint, path, body=None):
    """The JSON of an answer of 200."""
    status, found = ask(endpoint, path, body)
    assert status == 200, (status, found)
    return found


def events(endpoint, path, body):
    """What a stream tells, up to its end; and whether it said so."""
    with opened(endpoint, path, {**body, "stream": True}) as answer:
        assert answer.getheader("content-type") == "text/event-stream", answer.read()
        lines = [line.removeprefix(b"data: ") for line in answer.read().split(b"\n\n") if line]
    is_whole = lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[: -1 if is_whole else None]], is_whole


@contextmanager
def opened(endpoint, path, body=None, raw=None, method=None):
    """An answer that is still to be read."""
    data = raw if body is None else json.dumps(body)
    with closing(http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=120)) as connection:
        how = method or ("GET" if data is None else "POST")
        connection.request(how, path, body=data, headers=dict(endpoint.headers))
        yield connection.getresponse()


def eventually(condition, timeout_s=120.0):
    """Whether something becomes true in time."""
    until = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found
