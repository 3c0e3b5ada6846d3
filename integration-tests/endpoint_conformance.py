"""What an endpoint answers, whichever engine it is of: one class of tests, run over each kind of worker."""

from contextlib import contextmanager

import pytest
from endpoint_words import LETTERS, SPECIAL, ask, events, save_tokenizer, told
from generation_conformance import TOLERANCE
from generation_stage import MODEL, local_stage

from generation import EndpointOptions

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": "model", "temperature": 0}


def ids_of(text):
    return [len(SPECIAL) + LETTERS.index(letter) for letter in text]


@contextmanager
def served(worker, folder, *stage, **endpoint):
    """A stage, and the endpoint of its worker."""
    options = EndpointOptions(tokenizer=save_tokenizer(folder), **endpoint)
    with local_stage(worker, *stage, worker_options={"endpoint": options}) as made:
        made.endpoint = made.call("endpoint")
        try:
            yield made
        finally:
            made.call("close_endpoint")


class Answers:
    """`plain` has an endpoint."""

    def test_a_completion_is_what_the_generator_makes(self, plain):
        asked = {**GREEDY, "prompt": "abc", "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
        found = told(plain.endpoint, COMPLETIONS, {**asked, "ignore_eos": True})
        (choice,) = found["choices"]
        assert (found["object"], choice["finish_reason"]) == ("text_completion", "length")
        assert choice["prompt_token_ids"] == ids_of("abc")
        tokens = choice["token_ids"]
        for at, token in enumerate(tokens):
            assert token == plain.likeliest([*ids_of("abc"), *tokens[:at]], plain.version)
        wanted = plain.plain_logprobs(ids_of("abc"), tokens, plain.version)
        logprobs = choice["logprobs"]["token_logprobs"]
        assert max(abs(a - b) for a, b in zip(wanted, logprobs, strict=True)) < TOLERANCE
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["weight_versions"] == [[plain.version, 12]]
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}

    def test_choices_are_ordered_and_a_seed_gives_them_again(self, plain):
        asked = {"model": "model", "prompt": ["abc", ids_of("xy")], "n": 3, "seed": 7, "max_tokens": 8}
        found = [told(plain.endpoint, COMPLETIONS, {**asked, "return_token_ids": True}) for _ in range(2)]
        assert found[0]["choices"] == found[1]["choices"]
        assert [choice["index"] for choice in found[0]["choices"]] == list(range(6))
        prompts = [choice["prompt_token_ids"] for choice in found[0]["choices"]]
        assert prompts == [ids_of("abc")] * 3 + [ids_of("xy")] * 3
        assert found[0]["usage"]["prompt_tokens"] == 5
        assert len({choice["text"] for choice in found[0]["choices"]}) > 2

    def test_a_chat_goes_by_the_template(self, plain):
        messages = [
            {"role": "system", "content": "ab"},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        ]
        asked = {**GREEDY, "messages": messages, "max_completion_tokens": 5, "return_token_ids": True}
        found = told(plain.endpoint, CHAT, {**asked, "logprobs": True})
        (choice,) = found["choices"]
        user = SPECIAL.index("<user>")
        assert choice["prompt_token_ids"] == [user, *ids_of("ab"), user, *ids_of("cd"), *ids_of(":")]
        assert (found["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
        content = choice["logprobs"]["content"]
        assert "".join(each["token"] for each in content) == choice["message"]["content"]
        assert [bytes(each["bytes"]).decode() for each in content] == [each["token"] for each in content]

    def test_a_stream_makes_the_same_as_an_answer(self, plain):
        asked = {**GREEDY, "max_tokens": 12, "n": 2, "stop": "QQ", "return_token_ids": True}
        for path, prompt in (
            (COMPLETIONS, {"prompt": "abc", "logprobs": 0}),
            (CHAT, {"messages": [{"role": "user", "content": "abc"}], "logprobs": True}),
        ):
            whole = told(plain.endpoint, path, {**asked, **prompt})
            usage = {"stream_options": {"include_usage": True}}
            pieces, is_whole = events(plain.endpoint, path, {**asked, **prompt, **usage})
            assert is_whole
            assert pieces[-1]["choices"] == []
            assert pieces[-1]["usage"] == whole["usage"]
            for wanted in whole["choices"]:
                own = [c for piece in pieces for c in piece["choices"] if c["index"] == wanted["index"]]
                assert len(own) > 3, "token by token"
                assert said(own, path) == said([wanted], path)
                assert [token for c in own for token in c["token_ids"]] == wanted["token_ids"]
                assert [c["finish_reason"] for c in own if c["finish_reason"]] == [wanted["finish_reason"]]
            assert len({piece["id"] for piece in pieces}) == 1

    def test_a_stop_string_ends_a_choice_and_what_is_generated_for_it(self, plain):
        asked = {**GREEDY, "prompt": "abc", "ignore_eos": True}
        text = told(plain.endpoint, COMPLETIONS, {**asked, "max_tokens": 30})["choices"][0]["text"]
        stop = text[9:12]
        before = plain.metrics()
        found = told(plain.endpoint, COMPLETIONS, {**asked, "max_tokens": 400, "stop": [stop, "QQQQ"]})
        (choice,) = found["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
        after = plain.wait_for(lambda found: not found.running)
        assert after.tokens - before.tokens < 400
        assert found["usage"]["completion_tokens"] <= 12

    def test_the_context_bounds_what_comes(self, plain):
        most, prompt = MODEL["max_position_embeddings"], "a" * 500
        asked = {**GREEDY, "prompt": prompt, "ignore_eos": True, "max_tokens": 10**18}
        found = told(plain.endpoint, COMPLETIONS, asked)
        assert found["usage"]["completion_tokens"] == most - 500
        found = told(plain.endpoint, COMPLETIONS, {**asked, "prompt": "a" * (most - 1)})
        assert found["usage"]["completion_tokens"] == 1
        status, refused = ask(plain.endpoint, COMPLETIONS, {**asked, "prompt": "a" * most})
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")

    @pytest.mark.parametrize(
        "extreme",
        [
            {"temperature": 1e-320},
            {"temperature": 2},
            {"top_p": 1e-300},
            {"top_k": 10**12},
            {"seed": 10**100},
            {"stop_token_ids": list(range(MODEL["vocab_size"]))},
        ],
    )
    def test_nothing_that_may_be_asked_for_ends_the_engine(self, plain, extreme):
        asked = {"model": "model", "prompt": ["abc", "d"], "n": 2, "max_tokens": 6, **extreme}
        found = told(plain.endpoint, COMPLETIONS, {**asked, "logprobs": 0})
        logprobs = [one for choice in found["choices"] for one in choice["logprobs"]["token_logprobs"]]
        assert logprobs and all(value <= 0 for value in logprobs)
        assert told(plain.endpoint, "/health") == {"weight_version": plain.version}

    def test_models_are_listed_by_name(self, plain):
        (model,) = told(plain.endpoint, "/v1/models")["data"]
        assert model == told(plain.endpoint, "/v1/models/model")
        assert ask(plain.endpoint, "/v1/models/other")[0] == 404
        assert told(plain.endpoint, "/health") == {"weight_version": plain.version}

    def test_openais_own_client_understands_it(self, plain):
        openai = pytest.importorskip("openai")
        client = openai.OpenAI(
            base_url=f"{plain.endpoint.url}/v1", api_key=plain.endpoint.token, max_retries=0, timeout=60
        )
        assert [model.id for model in client.models.list()] == ["model"]
        asked = {
            "model": "model",
            "messages": [{"role": "user", "content": "abc"}],
            "temperature": 0,
            "max_tokens": 9,
        }
        whole = client.chat.completions.create(**asked, logprobs=True)
        pieces = client.chat.completions.create(**asked, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == whole.choices[0].message.content
        assert whole.choices[0].weight_versions[0][0] == plain.version
        done = client.completions.create(model="model", prompt="abc", max_tokens=4, extra_body={"top_k": 5})
        assert done.usage.completion_tokens <= 4
        with pytest.raises(openai.BadRequestError, match="echo"):
            client.completions.create(model="model", prompt="abc", echo=True)
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.completions.create(model="other", prompt="abc")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def said(choices, path):
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join((choice.get("message") or choice["delta"]).get("content", "") for choice in choices)
