"""One endpoint for replicas on Ray: all of them answer, and one that is killed is found again."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

from endpoint_words import LETTERS, ask, events, eventually, opened, save_tokenizer
from generation_echo import MODEL as ECHO
from generation_echo import EchoTrainer
from generation_readme import run_on_echoes
from generation_stage import group_stage

from generation import EndpointOptions, GenerationError
from generation.openai.following import one_endpoint
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import WorkerFailureError

COMPLETIONS = "/v1/completions"
ASKED = {"model": "model", "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def echoes(local_ray_session, tmp_path_factory):
    """Two replicas of an engine without a model, each with an endpoint."""
    endpoint = EndpointOptions(tokenizer=save_tokenizer(tmp_path_factory.mktemp("words")))
    with (
        connected(local_ray_session),
        group_stage(
            "generation_echo.EchoWorker",
            2,
            ECHO,
            EchoTrainer,
            name_prefix="endpoints",
            worker_options={"endpoint": endpoint},
        ) as made,
    ):
        yield made


def text_of(letter, version):
    return "".join(LETTERS[LETTERS.index(letter) + version * step] for step in range(1, 5))


def test_requests_are_shared_and_answered_by_all(echoes):
    before = [found.tokens for found in echoes.generators.metrics()]
    with one_endpoint(echoes.generators) as endpoint, ThreadPoolExecutor(8) as clients:
        letters = LETTERS[:20] * 4
        found = list(clients.map(lambda one: ask(endpoint, COMPLETIONS, {**ASKED, "prompt": one}), letters))
        pieces, is_whole = events(endpoint, COMPLETIONS, {**ASKED, "prompt": "c"})
    assert {status for status, _ in found} == {200}
    texts = [answer["choices"][0]["text"] for _, answer in found]
    assert texts == [text_of(letter, echoes.version) for letter in letters]
    assert is_whole
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text_of("c", echoes.version)
    after = [found.tokens for found in echoes.generators.metrics()]
    assert all(now > then for now, then in zip(after, before, strict=True))


def test_a_conversation_stays_with_its_replica(echoes):
    before = [found.tokens for found in echoes.generators.metrics()]
    with one_endpoint(echoes.generators, strategy="consistent_hash", key="json:user") as endpoint:
        for _ in range(6):
            assert ask(endpoint, COMPLETIONS, {**ASKED, "prompt": "a", "user": "me"})[0] == 200
    gained = [now.tokens - then for now, then in zip(echoes.generators.metrics(), before, strict=True)]
    assert sorted(gained) == [0, 24]


def test_one_that_is_killed_is_found_again_with_current_weights(echoes):
    with one_endpoint(echoes.generators) as endpoint:
        echoes.sync()
        wanted = text_of("a", echoes.version)
        group = echoes.generators.group
        generation = group.generation
        os.kill(echoes.generators.call("pid")[0], signal.SIGKILL)

        def all_answer():
            found = [ask(endpoint, COMPLETIONS, {**ASKED, "prompt": "a"}) for _ in range(4)]
            right = [answer["choices"][0]["text"] for status, answer in found if status == 200]
            assert set(right) <= {wanted}, "whoever answers has the version that is published"
            return len(right) == len(found) and group.generation > generation

        assert eventually(all_answer)
        before = [found.tokens for found in echoes.generators.metrics()]
        assert eventually(
            lambda: (
                ask(endpoint, COMPLETIONS, {**ASKED, "prompt": "a"})[0] == 200
                and echoes.generators.metrics()[0].tokens > before[0]
            )
        ), "who was replaced gets requests, too"


def test_a_stream_whose_replica_dies_breaks_off_and_does_not_end(echoes):
    with one_endpoint(echoes.generators) as endpoint:
        asked = {**ASKED, "prompt": "a", "max_tokens": 900, "stream": True}
        with opened(endpoint, COMPLETIONS, asked) as answer:
            answer.readline()
            for pid in echoes.generators.call("pid"):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(IncompleteRead) as broken:
                answer.read()
        assert b"[DONE]" not in broken.value.partial
        assert eventually(lambda: ask(endpoint, COMPLETIONS, {**ASKED, "prompt": "a"})[0] == 200)


def test_generators_without_an_endpoint_have_none(local_ray_session):
    with (
        connected(local_ray_session),
        group_stage("generation_echo.EchoWorker", 1, ECHO, EchoTrainer, name_prefix="mute") as made,
        pytest.raises(WorkerFailureError, match="no endpoint") as failure,
        one_endpoint(made.generators),
    ):
        pass
    assert isinstance(failure.value.__cause__, GenerationError)


def test_the_block_of_the_readme_runs(local_ray_session, tmp_path):
    openai = pytest.importorskip("openai")
    folder = save_tokenizer(tmp_path)

    def endpoint_options(model_name, tokenizer):
        return EndpointOptions(model_name=model_name, tokenizer=folder)

    def names_of(trainer):
        trainer.publisher.publish({"add": torch.tensor([1.0])})
        return {"EndpointOptions": endpoint_options, "one_endpoint": one_endpoint, "openai": openai}

    run_on_echoes("openai.OpenAI", local_ray_session, names_of)
