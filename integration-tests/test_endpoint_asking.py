"""What an endpoint makes of a client's JSON, and of tokens: no engine, no server."""

import itertools
import json
import random
import re

import pytest

pytest.importorskip("transformers")

import generation_stage  # noqa: F401  # finds the example

from generation import Sampling, SamplingError
from generation.openai.answers import Answer
from generation.openai.asking import read
from generation.openai.choices import Choice, joined
from generation.openai.errors import ApiError
from generation.openai.options import EndpointOptions
from generation.openai.text import MOST_HELD, TextStream
from generation.samples import Added

PROMPT = {"model": "m", "prompt": "abc"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "abc"}]}


def asked(fields, kind="completions"):
    return read(kind, json.dumps(fields).encode())


class TestAsking:
    def test_what_is_not_said_is_as_openai_has_it(self):
        found = asked(PROMPT)
        assert (found.prompts, found.max_tokens, found.sampling.n) == (["abc"], 16, 1)
        assert found.sampling.temperature == 1
        assert (found.streams, found.wants_logprobs, found.wants_ids, found.stops) == (
            False,
            False,
            False,
            [],
        )
        chat = asked(CHAT, "chat/completions")
        assert chat.max_tokens is None, "a chat goes on for as long as the context has room"
        assert chat.messages == [{"role": "user", "content": "abc"}]

    def test_null_says_the_same_as_nothing(self):
        nothing = dict.fromkeys(("n", "stop", "stream", "logprobs", "max_tokens", "seed", "suffix"))
        assert asked({**PROMPT, **nothing}) == asked(PROMPT)

    @pytest.mark.parametrize(
        ("prompt", "found"),
        [
            (["ab", "c"], ["ab", "c"]),
            ([5, 6], [[5, 6]]),
            ([[5], [6, 7]], [[5], [6, 7]]),
            (["ab", [5]], ["ab", [5]]),
        ],
    )
    def test_prompts_are_text_or_ids(self, prompt, found):
        assert asked({**PROMPT, "prompt": prompt}).prompts == found

    def test_what_says_what_holds_anyway_is_let_through(self):
        neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "best_of": 1, "echo": False}
        assert asked({**PROMPT, **neutral, "user": "me", "logit_bias": {}}) == asked(PROMPT)
        neutral = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "none", "top_logprobs": 0}
        assert asked({**CHAT, **neutral}, "chat/completions") == asked(CHAT, "chat/completions")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"model": None}, "model"),
            ({"model": 3}, "model"),
            ({"prompt": None}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": [True]}, "prompt"),
            ({"prompt": [5, "a"]}, "prompt"),
            ({"prompt": {"text": "a"}}, "prompt"),
            ({"prompt": "\ud800"}, "prompt"),
            ({"n": 0}, "n"),
            ({"n": True}, "n"),
            ({"n": 10**9}, "n"),
            ({"temperature": -1}, "temperature"),
            ({"temperature": 2.1}, "temperature"),
            ({"temperature": 10**400}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"temperature": float("inf")}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"top_k": -1}, "top_k"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": True}, "max_tokens"),
            ({"seed": "x"}, "seed"),
            ({"stop": 3}, "stop"),
            ({"stop": ["a", ""]}, "stop"),
            ({"stop": ["a"] * 17}, "stop"),
            ({"stop": "a" * 257}, "stop"),
            ({"stop_token_ids": 3}, "stop_token_ids"),
            ({"stop_token_ids": [-1]}, "stop_token_ids"),
            ({"ignore_eos": 1}, "ignore_eos"),
            ({"stream": "yes"}, "stream"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
            ({"logprobs": 2}, "logprobs"),
            ({"logprobs": False}, "logprobs"),
            ({"echo": True}, "echo"),
            ({"best_of": 4}, "best_of"),
            ({"frequency_penalty": 0.5}, "frequency_penalty"),
            ({"frequency_penalty": False}, "frequency_penalty"),
            ({"logit_bias": {"5": 100}}, "logit_bias"),
            ({"max_token": 3}, "max_token"),
            ({"messages": []}, "messages"),
        ],
    )
    def test_what_can_not_be_meant_is_refused_by_name(self, fields, param):
        with pytest.raises(ApiError) as error:
            asked({**PROMPT, **fields})
        told = error.value.body["error"]
        assert (error.value.status, told["type"], told["param"]) == (400, "invalid_request_error", param)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": ["abc"]}, "messages[0]"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0]"),
            ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"logprobs": 1}, "logprobs"),
            ({"top_logprobs": 5}, "top_logprobs"),
            ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
            ({"prompt": "abc"}, "prompt"),
        ],
    )
    def test_so_is_what_a_chat_can_not_have(self, fields, param):
        with pytest.raises(ApiError) as error:
            asked({**CHAT, **fields}, "chat/completions")
        assert (error.value.status, error.value.param) == (400, param)

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 200_000, b'{"model": ' + b"9" * 5000 + b"}"]
    )
    def test_what_is_no_json_object_is_refused(self, body):
        with pytest.raises(ApiError, match="no JSON"):
            read("completions", body)

    def test_an_endpoint_that_can_not_be_meant_is_refused(self):
        for wrong in ({"model_name": ""}, {"max_samples": 0}, {"max_body_bytes": 0}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                EndpointOptions(**wrong)

    def test_a_temperature_no_float_can_be_is_refused_in_the_driver_too(self):
        for wrong in (10**400, float("inf"), 2.1):
            with pytest.raises(SamplingError, match="temperature"):
                Sampling(temperature=wrong)


def of_bytes(tokens):
    """A tokenizer whose tokens are bytes, as the halves of many characters are."""
    return bytes(tokens).decode(errors="replace")


def of_pieces(tokens):
    """A tokenizer whose tokens are some bytes, wherever characters begin."""
    return b"".join(tokens).decode(errors="replace")


def of_bytes_or_none(tokens):
    """A tokenizer whose tokens are bytes, of which a run that is no text is so many characters."""

    def whole(run):
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    return "".join(whole(run) for run in re.findall(rb"[\x00-\x7f]|[\x80-\xff]+", bytes(tokens)))


def pieces(stream, tokens, size=1):
    found = [stream.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return [*found, stream.end()]


class TestText:
    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    def test_pieces_make_the_text_and_no_half_a_character(self, size):
        text = "héé 𝄞 wörld ∑"
        found = pieces(TextStream(of_bytes), text.encode(), size)
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)

    def test_what_never_becomes_a_character_is_told_in_time(self):
        stream = TextStream(of_bytes)
        told = [stream.add([0xFF]) for _ in range(3 * MOST_HELD)]
        assert sum(map(len, told)) >= 2 * MOST_HELD
        assert "".join([*told, stream.end()]) == "\ufffd" * 3 * MOST_HELD

    def test_tokens_that_end_a_character_and_begin_the_next_make_the_text(self):
        draw = random.Random(0)
        for _ in range(2000):
            text = "".join(draw.choices("aé☃😀", k=30)).encode()
            cuts = sorted({0, len(text), *draw.sample(range(len(text)), k=len(text) // 2)})
            tokens = [text[a:b] for a, b in itertools.pairwise(cuts)]
            assert "".join(pieces(TextStream(of_pieces), tokens, draw.randint(1, 3))) == text.decode()
            for size in (1, draw.randint(2, 9)):
                assert "".join(pieces(TextStream(of_bytes_or_none), text, size)) == text.decode()

    @pytest.mark.parametrize("prompt", ["☃☃", "é😀☃", "a☃", "😀"])
    @pytest.mark.parametrize("decode", [of_bytes, of_bytes_or_none])
    def test_what_was_before_may_begin_within_a_character(self, decode, prompt):
        text = "☃😀é" * 5
        for size in (1, 4):
            assert "".join(pieces(TextStream(decode, prompt.encode()), text.encode(), size)) == text

    def test_a_character_is_told_once_all_its_bytes_are_there(self):
        tokens = ["😀".encode()[:2], *["😀😀".encode()[2:6]] * 20]
        stream = TextStream(of_pieces)
        told = [stream.add([token]) for token in tokens]
        assert told == ["", *["😀"] * 20]

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_a_stop_string_ends_the_text_before_it(self, size):
        stream = TextStream(of_bytes, stops=["END", "NEVER"])
        assert "".join(pieces(stream, b"some EN text END and more", size)) == "some EN text "
        assert stream.is_stopped

    def test_the_beginning_of_a_stop_string_is_held_until_it_is_none(self):
        stream = TextStream(of_bytes, stops=["abab!"])
        assert [stream.add([byte]) for byte in b"xabab"] == ["x", "", "", "", ""]
        assert stream.add(b"a") == "ab", "which may begin two letters later"
        assert (stream.add(b"b!"), stream.is_stopped) == ("", True)
        open_end = TextStream(of_bytes, stops=["abab!"])
        assert pieces(open_end, b"xaba") == ["x", "", "", "", "aba"]

    def test_what_was_before_counts_for_how_the_first_token_is_decoded(self):
        def decode(tokens):  # the first word has no space before it
            return " ".join(f"w{token}" for token in tokens)

        assert "".join(pieces(TextStream(decode, [1, 2]), [3, 4])) == " w3 w4"

    def test_a_choice_says_which_weights_chose_its_tokens(self):
        choice = Choice(0, (7,), of_bytes, ["!"])
        parts = [choice.add(Added(list(b"ab"), [-1.0, -2.0], 3)), choice.add(Added(list(b"c"), [-3.0], 3))]
        parts.append(choice.add(Added(list(b"d!"), [-4.0, -5.0], 4)))
        whole = joined(parts)
        assert (whole.text, whole.finish_reason, whole.prompt) == ("abcd", "stop", (7,))
        assert whole.versions == [(3, 3), (4, 2)]
        assert (choice.is_done, choice.count) == (True, 5)
        assert [part.at for part in parts] == [0, 2, 3]

    def test_special_tokens_do_not_take_the_space_of_what_comes_after_them(self):
        def decode(tokens):  # 0 stands for no text, and the first word has no space before it
            return " ".join(f"w{token}" for token in tokens if token)

        for run in (1, 3 * MOST_HELD):
            assert "".join(pieces(TextStream(decode, [1]), [2, *[0] * run, 3])) == " w2 w3"


class TestLogprobs:
    @pytest.mark.parametrize("size", [1, 2, 5])
    @pytest.mark.parametrize("text", ["ab é☃y", "abx ☃", "xyabc"])
    def test_texts_and_places_of_tokens_are_those_of_the_text(self, text, size):
        """Whatever is held back, as it may be a stop string or is half a character."""
        choice, tokens = Choice(0, (7,), of_bytes, ["abq"]), text.encode()
        parts = [
            choice.add(Added(tokens[at : at + size], [-1.0] * len(tokens[at : at + size]), 1))
            for at in range(0, len(tokens), size)
        ]
        parts.append(choice.end("length"))
        asks = {"completions": {**PROMPT, "logprobs": 0}, "chat/completions": {**CHAT, "logprobs": True}}
        for kind, fields in asks.items():
            answer = Answer.to(asked(fields, kind))
            pieces = [answer.piece(part)["choices"][0]["logprobs"] for part in parts]
            (whole,) = answer.whole([joined(parts)], {})["choices"]
            for told in (pieces, [whole["logprobs"]]):
                if kind == "completions":
                    texts = [one for each in told for one in each["tokens"]]
                    offsets = [one for each in told for one in each["text_offset"]]
                    assert offsets == [len("".join(texts[:at])) for at in range(len(tokens))]
                else:
                    content = [one for each in told for one in each["content"]]
                    texts = [one["token"] for one in content]
                    assert bytes(byte for one in content for byte in one["bytes"]).decode() == text
                assert "".join(texts) == text
                assert len(texts) == len(tokens)
