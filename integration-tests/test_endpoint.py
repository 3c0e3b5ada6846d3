"""An endpoint in OpenAI's form, over a generator of this process: answers, streams, ends and refusals."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

from endpoint_conformance import CHAT, COMPLETIONS, GREEDY, Answers, served
from endpoint_words import LETTERS, ask, eventually, opened, told
from generation_echo import MODEL as ECHO
from generation_echo import AdaptedWorker, EchoTrainer, EchoWorker
from generation_stage import local_stage

from generation import EndpointOptions, RefusedError
from generation.transformers_worker import TransformersWorker
from raycrew.tensor_transport import WeightUpdateError
from raycrew.worker_groups.services import Proxy


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A transformers model."""
    with served(TransformersWorker, tmp_path_factory.mktemp("words")) as made:
        yield made


@pytest.fixture
def echo(tmp_path):
    """An engine without a model: each token is the one before and the version."""
    with served(EchoWorker, tmp_path, ECHO, EchoTrainer, max_samples=64, max_body_bytes=1 << 16) as made:
        yield made


class TestAnswers(Answers):
    """Of the plain generator."""


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "status", "code"),
        [
            (COMPLETIONS, {**GREEDY, "prompt": ""}, 400, None),
            (COMPLETIONS, {**GREEDY, "prompt": [-1]}, 400, None),
            (COMPLETIONS, {**GREEDY, "prompt": [5], "stop_token_ids": [97]}, 400, None),
            (COMPLETIONS, {**GREEDY, "prompt": "a", "model": "tuned"}, 404, "model_not_found"),
            (COMPLETIONS, {**GREEDY, "prompt": ["a"] * 33, "n": 2}, 400, None),
            (CHAT, {**GREEDY, "messages": [{"role": "nobody", "content": "a"}]}, 400, None),
            (COMPLETIONS, {**GREEDY, "prompt": "a" * (1 << 16)}, 413, "too_long"),
            ("/v1/embeddings", {}, 404, "unknown_url"),
            (COMPLETIONS, None, 405, "method_not_supported"),
        ],
    )
    def test_what_can_not_be_answered_is_told_in_openais_form(self, echo, path, body, status, code):
        got, found = ask(echo.endpoint, path, body)
        assert (got, found["error"]["code"], found.keys()) == (status, code, {"error"})
        assert found["error"].keys() == {"message", "type", "param", "code"}
        assert echo.metrics().tokens == 0

    def test_an_adapter_is_a_model_for_as_long_as_it_is_loaded(self, echo, monkeypatch):
        engine, asked = echo.worker._life.awake.loop.engine, {**GREEDY, "prompt": "a", "model": "tuned"}
        for loaded, status in [(("tuned",), 200), ((), 404)]:
            monkeypatch.setattr(engine, "adapters", loaded)
            listed = told(echo.endpoint, "/v1/models")["data"]
            assert [model["id"] for model in listed] == ["model", *loaded]
            assert (
                ask(echo.endpoint, "/v1/models/tuned")[0]
                == ask(echo.endpoint, COMPLETIONS, asked)[0]
                == status
            )
        echo.call("sleep")
        assert [model["id"] for model in told(echo.endpoint, "/v1/models")["data"]] == ["model"]

    def test_no_adapter_is_called_as_the_model_itself(self, tmp_path):
        adapter = tmp_path / "adapter"
        adapter.write_text("1")
        with served(AdaptedWorker, tmp_path, ECHO, EchoTrainer, model_name="mine") as made:
            with pytest.raises(RefusedError, match="calls the model itself so"):
                made.call("load_adapter", "mine", str(adapter))
            made.call("load_adapter", "model", str(adapter))
            tokens = {}
            for name in ("mine", "model"):
                asked = {**GREEDY, "model": name, "prompt": [7], "max_tokens": 2, "return_token_ids": True}
                tokens[name] = told(made.endpoint, COMPLETIONS, asked)["choices"][0]["token_ids"]
            assert tokens == {"mine": [8, 9], "model": [1, 1]}

    def test_who_does_not_know_the_token_is_let_nowhere(self, echo):
        with socket.create_connection((echo.endpoint.host, echo.endpoint.port), timeout=30) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 401")

    def test_hostile_bodies_harm_nobody(self, echo):
        deep = b"[" * 50_000
        for raw in (b"", b"\xff\xfe", deep, b'{"model":' + deep, b"9" * 6000, b'{"prompt": NaN}', b"null"):
            status, found = ask(echo.endpoint, COMPLETIONS, raw=raw, method="POST")
            assert (status, found["error"]["type"]) == (400, "invalid_request_error"), raw[:20]
        assert told(echo.endpoint, COMPLETIONS, {**GREEDY, "prompt": "a"})["usage"]["completion_tokens"] == 16

    @pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-9])
    def test_no_temperature_ends_the_engine(self, plain, temperature):
        asked = {"model": "model", "prompt": "abc", "max_tokens": 8, "ignore_eos": True, "seed": 1}
        found = told(plain.endpoint, COMPLETIONS, {**asked, "temperature": temperature})
        assert found["choices"] == told(plain.endpoint, COMPLETIONS, {**asked, **GREEDY})["choices"]

    def test_what_the_engine_itself_does_not_take_is_told_and_harms_nobody(self, echo, monkeypatch):
        def refuses(_):
            raise ValueError("no such thing, got 3")

        monkeypatch.setattr(echo.worker._life.awake.loop.engine, "add", refuses)
        status, found = ask(echo.endpoint, COMPLETIONS, {**GREEDY, "prompt": "a", "n": 2})
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")
        assert "no such thing, got 3" in found["error"]["message"]
        monkeypatch.undo()
        assert ask(echo.endpoint, COMPLETIONS, {**GREEDY, "prompt": "a"})[0] == 200

    def test_a_sleeper_says_so(self, echo):
        echo.call("sleep", "abort")
        for path, body in ((COMPLETIONS, {**GREEDY, "prompt": "a"}), ("/health", None)):
            status, found = ask(echo.endpoint, path, body)
            assert (status, found["error"]["code"]) == (503, "asleep")
        echo.call("wake")
        assert told(echo.endpoint, "/health") == {"weight_version": 1}

    def test_there_is_no_endpoint_without_a_tokenizer(self, tmp_path):
        for options, says in (({}, "say which folder"), ({"tokenizer": str(tmp_path)}, "has none")):
            stage = local_stage(
                EchoWorker, ECHO, EchoTrainer, worker_options={"endpoint": EndpointOptions(**options)}
            )
            with pytest.raises(RefusedError, match=says), stage:
                pass


LONG = {**GREEDY, "prompt": "a", "max_tokens": 900}


class TestEnds:
    """Whatever becomes of a client, an update, or the engine: who asked is told, and nothing is left."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_ends_its_samples(self, echo, stream):
        with gone_after(echo, {**LONG, "n": 3, "stream": stream}, lambda found: found.running == 3):
            pass
        assert echo.wait_for(lambda found: not found.running).aborted == 3

    @pytest.mark.parametrize("stream", [False, True])
    def test_also_in_a_pause(self, echo, stream):
        echo.call("pause")
        with gone_after(echo, {**LONG, "n": 3, "stream": stream}, lambda found: found.waiting == 3):
            pass
        echo.wait_for(lambda found: not found.waiting)
        echo.call("resume")
        assert echo.metrics().aborted == 3

    def test_a_client_that_does_not_read_is_let_go(self, tmp_path):
        with served(EchoWorker, tmp_path, ECHO, EchoTrainer, idle_timeout_s=0.5) as echo:
            body = json.dumps({**LONG, "n": 64, "stream": True, "return_token_ids": True}).encode()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect((echo.endpoint.host, echo.endpoint.port))
                client.sendall(head_of(echo.endpoint, body) + body)
                echo.wait_for(lambda found: found.running == 64)
                beside = told(echo.endpoint, COMPLETIONS, {**GREEDY, "prompt": "b"})
                assert beside["usage"]["completion_tokens"] == 16, "nobody else waits for it"
                echo.wait_for(lambda found: not found.running)
            assert told(echo.endpoint, "/health") == {"weight_version": 1}

    def test_a_stream_goes_on_under_new_weights_and_says_from_where(self, echo):
        with opened(echo.endpoint, COMPLETIONS, {**LONG, "stream": True}) as answer:
            first = answer.readline()
            after = echo.sync()
            lines = (first + answer.read()).strip().split(b"\n\n")
        assert lines[-1] == b"data: [DONE]"
        pieces = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        runs = [run for piece in pieces for choice in piece["choices"] for run in choice["weight_versions"]]
        assert [version for version, _ in runs] == sorted(version for version, _ in runs)
        assert {version for version, _ in runs} == {after - 1, after}
        assert sum(count for _, count in runs) == 900

    def test_an_update_that_ends_samples_says_so(self, echo):
        echo.call("set_on_update", "abort")
        with opened(echo.endpoint, COMPLETIONS, {**LONG, "stream": True}) as answer:
            answer.readline()
            echo.sync()
            lines = answer.read().strip().split(b"\n\n")
        assert lines[-1] == b"data: [DONE]"
        assert json.loads(lines[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "abort"

    @pytest.mark.parametrize("how", [("sleep", "abort"), ("abort",), ("pause", "abort")])
    def test_a_stream_that_somebody_ends_says_so(self, echo, how):
        with opened(echo.endpoint, COMPLETIONS, {**LONG, "n": 2, "stream": True}) as answer:
            answer.readline()
            echo.call(*how)
            lines = answer.read().strip().split(b"\n\n")
        assert lines[-1] == b"data: [DONE]"
        last = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[-3:-1]]
        assert {(choice["index"], choice["finish_reason"]) for choice in last} == {(0, "abort"), (1, "abort")}

    def test_an_update_that_leaves_a_mixture_ends_a_stream_with_an_error(self, echo):
        with opened(echo.endpoint, COMPLETIONS, {**LONG, "stream": True}) as answer:
            answer.readline()
            echo.worker._life.awake.loop.engine.loads_to_fail = 2
            with pytest.raises(WeightUpdateError):
                echo.sync()
            lines = answer.read().strip().split(b"\n\n")
        assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "no_weights"
        assert ask(echo.endpoint, COMPLETIONS, LONG)[0] == 503
        echo.sync()
        assert told(echo.endpoint, "/health") == {"weight_version": echo.version}

    def test_of_updates_at_once_the_one_that_is_still_kept_comes(self, echo):
        old, new = (echo.model.publish_weights().version for _ in range(2))
        with opened(echo.endpoint, COMPLETIONS, {**LONG, "max_tokens": 200, "stream": True}) as answer:
            answer.readline()
            with ThreadPoolExecutor(3) as clients:
                late, *good = [clients.submit(echo.call, "apply_weights", one) for one in (old, new, new)]
                with pytest.raises(WeightUpdateError, match="is not kept"):
                    late.result()
                assert {receipt.result().version for receipt in good} == {new}
            answer.read()
        choice = told(echo.endpoint, COMPLETIONS, {**GREEDY, "prompt": "a", "logprobs": 0})["choices"][0]
        assert set(choice["logprobs"]["token_logprobs"]) == {float(new)}
        assert choice["weight_versions"] == [[new, 16]]

    def test_who_comes_when_there_is_no_place_is_told_and_does_no_harm(self, tmp_path):
        with (
            served(EchoWorker, tmp_path, ECHO, EchoTrainer, max_connections=4) as echo,
            ExitStack() as held,
        ):
            for _ in range(4):
                held.enter_context(opened(echo.endpoint, COMPLETIONS, {**LONG, "stream": True}))
            for _ in range(20):
                with suppress(ConnectionError):  # whoever has not sent all by then is cut off
                    assert ask(echo.endpoint, "/health")[0] == 503
            held.close()
            echo.wait_for(lambda found: not found.running)
            assert eventually(lambda: ask(echo.endpoint, "/health")[0] == 200)

    def test_an_engine_that_fails_in_mid_stream_is_told_and_no_stream_ends_well(self, echo):
        with opened(echo.endpoint, COMPLETIONS, {**LONG, "stream": True}) as answer:
            answer.readline()
            echo.worker._life.awake.loop.engine.failure = RuntimeError("no memory is left")
            lines = answer.read().strip().split(b"\n\n")
        last = json.loads(lines[-1].removeprefix(b"data: "))
        assert last["error"]["code"] == "engine_failed"
        status, found = ask(echo.endpoint, COMPLETIONS, LONG)
        assert (status, found["error"]["code"]) == (503, "engine_failed")
        assert ask(echo.endpoint, "/health")[0] == 500
        assert echo.metrics().state == "failed"
        echo.call("wake")
        assert told(echo.endpoint, "/health") == {"weight_version": 1}
        assert (
            told(echo.endpoint, COMPLETIONS, {**LONG, "max_tokens": 1})["choices"][0]["finish_reason"]
            == "length"
        )

    def test_one_whose_engine_has_failed_has_others_answer_until_it_has_a_new_one(self, tmp_path):
        replicas = [served(EchoWorker, tmp_path, ECHO, EchoTrainer) for _ in range(2)]
        asked = {**GREEDY, "prompt": "a", "max_tokens": 1}
        with ExitStack() as stack:
            failed, other = (stack.enter_context(one) for one in replicas)
            failed.worker._life.awake.loop.engine.failure = RuntimeError("no memory is left")
            assert ask(failed.endpoint, COMPLETIONS, asked)[0] == 500
            targets = [replace(one.endpoint, rank=rank) for rank, one in enumerate((failed, other))]
            proxy = stack.enter_context(Proxy(targets, strategy="round_robin"))
            for _ in range(6):
                assert told(proxy.endpoint, COMPLETIONS, asked)
            failed.call("wake")
            assert eventually(lambda: told(proxy.endpoint, COMPLETIONS, asked) and failed.metrics().tokens)

    def test_many_requests_at_once_are_all_answered(self, echo):
        found, lock = [], threading.Lock()

        def client(number):
            for each in range(20):
                letter = LETTERS[(number + each) % 26]
                choice = told(echo.endpoint, COMPLETIONS, {**GREEDY, "prompt": letter, "max_tokens": 3})[
                    "choices"
                ][0]
                with lock:
                    found.append((letter, choice["text"]))

        clients = [threading.Thread(target=client, args=(number,)) for number in range(32)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert len(found) == 640
        add = echo.version
        for letter, text in found:
            at = LETTERS.index(letter)
            assert text == "".join(LETTERS[at + add * step] for step in (1, 2, 3))
        assert echo.metrics().running == 0


def head_of(endpoint, body):
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {endpoint.token}\r\n\r\n"
    ).encode()


@contextmanager
def gone_after(stage, fields, condition):
    """A client that closes its connection once the generator is so."""
    body = json.dumps(fields).encode()
    with socket.create_connection((stage.endpoint.host, stage.endpoint.port), timeout=60) as client:
        client.sendall(head_of(stage.endpoint, body) + body)
        stage.wait_for(condition)
        yield
