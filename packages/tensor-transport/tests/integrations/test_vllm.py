"""Weights into an engine of vLLM, on a stand-in for it: `integration-tests/on_vllm` has the real one."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from forking import in_a_child
from vllm_fake import NAMES, ROWS, WIDTH, Llm, Model, Workers, install

from raycrew.tensor_transport import (
    BucketFetchError,
    LoadRefusedError,
    ManifestMismatchError,
    StaleWeightsError,
    TransportError,
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    WeightUpdateError,
    sync_weights,
)
from raycrew.tensor_transport.integrations.vllm import (
    EngineLoader,
    EngineLoadError,
    GreedyReference,
    VllmWeights,
    WeightCheckError,
    compare_greedy,
    greedy_references,
    register,
)
from raycrew.tensor_transport.integrations.vllm._outcomes import Mailbox, Outcome, tell
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.transports import this_process

TENSORS = [name for parts in NAMES.values() for name in parts]


def model(value):
    return {
        name: torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH) + 100 * place + 1000 * value
        for place, name in enumerate(TENSORS)
    }


def same(held, expected):
    return held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in held)


@pytest.fixture
def factory(monkeypatch):
    made = install(monkeypatch)
    register()
    register()  # vLLM may load a plugin more than once
    return made


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def publisher(store):
    with contextlib.closing(WeightPublisher(store)) as publisher:
        yield publisher


@pytest.fixture(params=["in process", "2 workers"])
def llm(factory, request):
    return Llm(factory) if request.param == "in process" else Llm(factory, 2, in_process=False)


class TestUpdates:
    def test_each_worker_has_its_slices_of_each_version(self, llm, store, publisher):
        with VllmWeights(llm, store=store) as weights:
            for value in (1, 2, 3):
                assert weights.apply_weights(publisher.publish(model(value))).version == value
                assert same(llm.workers.held(), model(value))
                assert weights.require() == value == int(llm.version)
                assert weights.tag(2).tolist() == [value] * 2

    def test_the_engine_is_paused_from_the_first_load_to_a_fresh_cache(self, llm, store, publisher):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
        assert llm.told == [
            "pause 0 keep",
            *("start_weight_update", "update_weights", "finish_weight_update"),
            *("reset_prefix_cache", "reset_connector", "reset_encoder_cache"),
            "resume ['scheduling']",
        ]

    def test_what_is_held_already_moves_nothing(self, llm, store, publisher):
        with VllmWeights(llm, store=store) as weights:
            update = publisher.publish(model(1))
            weights.apply_weights(update)
            llm.told.clear()
            assert weights.apply_weights(update).size_bytes == 0
        assert llm.told == []

    def test_by_number_and_after_a_restart(self, llm, store):
        with WeightDirectory.local(keep=2) as directory:
            publisher = WeightPublisher(store, directory=directory)
            trainer = type("Trainer", (), {"publish_weights": lambda _: publisher.publish(model(7))})()
            with VllmWeights(llm, store=store, directory=directory, name="one") as weights:
                assert weights.pull(missing_ok=True) is None
                steps = {"prepare": "prepare_weights", "directory": directory}
                sync_weights(LocalPeers([trainer]), LocalPeers([weights]), **steps)
                assert same(llm.workers.held(), model(7))
            with VllmWeights(llm, store=store, directory=directory, name="one") as weights:
                with pytest.raises(StaleWeightsError):
                    weights.require()
                assert weights.pull().version == weights.version == 1
            publisher.close()


class TestThreads:
    def test_an_update_has_those_of_the_engine_and_others_stay_as_they_are(
        self, llm, store, publisher, monkeypatch
    ):
        before, seen, load = torch.get_num_threads(), [], Model.load_weights

        def loading(self, weights):
            seen.append(torch.get_num_threads())
            load(self, weights)

        monkeypatch.setattr(Model, "load_weights", loading)
        try:
            with VllmWeights(llm, store=store) as weights:
                torch.set_num_threads(before + 2)
                weights.apply_weights(publisher.publish(model(1)))
                fail_once(monkeypatch, llm)
                with pytest.raises(WeightUpdateError):
                    weights.apply_weights(publisher.publish(model(2)))
                assert torch.get_num_threads() == before + 2
        finally:
            torch.set_num_threads(before)
        assert set(seen) == {before}


class TestLoader:
    def test_into_an_engine_that_somebody_else_pauses(self, llm, store, publisher, monkeypatch):
        llm.is_paused = True
        load = EngineLoader(llm)
        receiver = WeightReceiver(load, store=store, verify_first=True, rollback="shadow")
        receiver.apply(publisher.publish(model(1)))
        assert same(llm.workers.held(), model(1))
        fail_once(monkeypatch, llm)
        with pytest.raises(WeightUpdateError) as caught:
            receiver.apply(publisher.publish(model(2)))
        assert caught.value.intact
        assert same(llm.workers.held(), model(1))
        receiver.close()
        load.close()


class TestFailures:
    def test_before_the_engine_is_touched_it_goes_on_as_it_was(self, llm, store, publisher):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            llm.told.clear()
            with pytest.raises(LoadRefusedError, match="publish it whole") as caught:
                weights.apply_weights(publisher.publish({"a": model(2)["a"]}, partial=True))
            assert caught.value.intact
            with pytest.raises(ManifestMismatchError):
                weights.apply_weights(publisher.publish(model(3) | {"more": torch.zeros(2)}))
            lost = publisher.publish(model(4))
            store.release(lost.buckets[0].ticket)
            with pytest.raises(BucketFetchError):
                weights.apply_weights(lost)
            assert weights.require() == 1
            assert llm.told == []
            assert same(llm.workers.held(), model(1))

    def test_workers_that_fail_half_way_get_the_version_before(self, llm, store, publisher, monkeypatch):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            fail_once(monkeypatch, llm)
            with pytest.raises(WeightUpdateError, match="rank 0: ValueError: no room") as caught:
                weights.apply_weights(publisher.publish(model(2)))
            assert isinstance(caught.value.__cause__, EngineLoadError)
            assert caught.value.__cause__.ranks == (0,)
            assert caught.value.intact
            assert same(llm.workers.held(), model(1))
            assert (llm.version, llm.is_paused) == ("1", False)
            weights.apply_weights(publisher.publish(model(3)))
            assert same(llm.workers.held(), model(3))

    def test_a_mixture_is_not_served_until_a_version_is_whole(self, llm, store, publisher, monkeypatch):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            llm.left["under way"] = 3
            with monkeypatch.context() as patch:
                fail_always(patch, llm)
                with pytest.raises(WeightUpdateError) as caught:
                    weights.apply_weights(publisher.publish(model(2)))
            assert not caught.value.intact
            assert not llm.left  # it would have gone on with the mixture
            for refused in (weights.require, lambda: weights.tag(1), lambda: weights.check([])):
                with pytest.raises(StaleWeightsError, match="mixture"):
                    refused()
            weights.apply_weights(publisher.publish(model(3)))
            assert weights.require() == 3
            assert same(llm.workers.held(), model(3))

    @pytest.mark.parametrize("missing", TENSORS)
    def test_a_first_version_that_lacks_a_tensor_is_not_served(self, llm, store, publisher, missing):
        with VllmWeights(llm, store=store) as weights:
            rest = {name: tensor for name, tensor in model(1).items() if name != missing}
            layer = next(layer for layer, parts in NAMES.items() if missing in parts)
            with pytest.raises(WeightUpdateError, match=f"not all weights of .*{layer}"):
                weights.apply_weights(publisher.publish(rest))
            with pytest.raises(StaleWeightsError):
                weights.require()

    def test_without_room_for_the_workers_nothing_changes(self, factory, store, publisher, monkeypatch):
        llm = Llm(factory, 2, in_process=False)
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            with monkeypatch.context() as patch:
                patch.setattr(weights._loader._stage._transport, "reserve", refuse)
                with pytest.raises(LoadRefusedError, match="there is no room") as caught:
                    weights.apply_weights(publisher.publish(model(2)))
            assert caught.value.intact
            assert weights.require() == 1

    def test_an_engine_that_does_not_go_on_says_so(self, llm, store, publisher, monkeypatch):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            with monkeypatch.context() as patch:
                patch.setattr(llm, "reset_prefix_cache", refuse)
                with pytest.raises(TransportError, match="there is no room"):
                    weights.apply_weights(update := publisher.publish(model(2)))
            for refused in (weights.require, lambda: weights.tag(1)):
                with pytest.raises(StaleWeightsError, match="stays paused"):
                    refused()
            weights.apply_weights(update)  # holds it already, and goes on
            assert (weights.require(), llm.version, llm.is_paused) == (2, "2", False)

    def test_an_engine_whose_connector_keeps_what_older_weights_computed_is_not_served(
        self, llm, store, publisher
    ):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            llm.connector_resets = False
            with pytest.raises(TransportError, match="KV connector did not drop"):
                weights.apply_weights(publisher.publish(model(2)))
            with pytest.raises(StaleWeightsError, match="stays paused"):
                weights.require()

    def test_an_engine_whose_connector_can_drop_nothing_is_refused(self, factory, monkeypatch):
        transfer = sys.modules["vllm.distributed.kv_transfer"]
        monkeypatch.setattr(transfer, "has_kv_transfer_group", lambda: True)
        with pytest.raises(EngineLoadError, match="Connector has no reset_cache"):
            VllmWeights(Llm(factory))

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_engine_that_is_paused_though_that_raised_goes_on(
        self, llm, store, publisher, monkeypatch, error
    ):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            raise_once_done(monkeypatch, llm, "sleep", error)
            with pytest.raises((WeightUpdateError, error)):
                weights.apply_weights(update := publisher.publish(model(2)))
            assert not llm.is_paused
            assert same(llm.workers.held(), model(1))
            weights.apply_weights(update)
            assert (weights.require(), llm.is_paused) == (2, False)

    @pytest.mark.parametrize("again", [False, True])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_engine_that_goes_on_though_that_raised_is_paused_for_the_next_update(
        self, llm, store, publisher, monkeypatch, error, again
    ):
        with VllmWeights(llm, store=store) as weights:
            raise_once_done(monkeypatch, llm, "wake_up", error)
            with pytest.raises(error):
                weights.apply_weights(update := publisher.publish(model(1)))
            with pytest.raises(StaleWeightsError, match="stays paused"):
                weights.require()
            weights.apply_weights(update if again else publisher.publish(model(2)))
            assert weights.require() == (1 if again else 2)
            assert same(llm.workers.held(), model(weights.version))
            assert not llm.is_paused

    def test_an_engine_that_neither_paused_nor_went_on_does_so_after_the_next_update(
        self, llm, store, publisher, monkeypatch
    ):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            pause = llm.sleep

            def fails(**how):
                pause(**how)
                raise RuntimeError("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(llm, "sleep", fails)
                patch.setattr(llm, "wake_up", refuse)
                with pytest.raises(WeightUpdateError, match="no answer"):
                    weights.apply_weights(update := publisher.publish(model(2)))
            with pytest.raises(StaleWeightsError, match="stays paused"):
                weights.require()
            weights.apply_weights(update)
            assert (weights.require(), llm.is_paused) == (2, False)

    def test_the_first_error_is_raised_where_the_engine_is_gone(self, llm, store, publisher, monkeypatch):
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            for name in ("update_weights", "abort_request", "wake_up"):
                monkeypatch.setattr(llm, name, refuse)
            with pytest.raises(WeightUpdateError, match="load") as caught:
                weights.apply_weights(publisher.publish(model(2)))
            assert not caught.value.intact
            assert any("stays paused" in note for note in caught.value.__notes__)
            with pytest.raises(StaleWeightsError, match="stays paused"):
                weights.require()

    def test_when_another_generator_fails_both_return(self, llm, store):
        with WeightDirectory.local(keep=2) as directory:
            publisher = WeightPublisher(store, directory=directory)
            value, fails = [1], [False]
            trainer = type("Trainer", (), {"publish_weights": lambda _: publisher.publish(model(value[0]))})()

            def load(tensors):
                if fails[0]:
                    raise RuntimeError("the other one fails")
                list(tensors)

            other = WeightReceiver(load, store=store, directory=directory, rollback="shadow")
            other.apply_weights = other.apply
            with VllmWeights(llm, store=store, directory=directory) as weights:
                generators = Concurrent([weights, other])
                sync_weights(LocalPeers([trainer]), generators, directory=directory, timeout_s=20)
                value[0], fails[0] = 2, True
                with pytest.raises(WeightUpdateError):
                    sync_weights(LocalPeers([trainer]), generators, directory=directory, timeout_s=20)
                assert weights.require() == 1
                assert same(llm.workers.held(), model(1))
                assert llm.version == "1"
            other.close()
            publisher.close()

    @pytest.mark.parametrize("fails", [False, True])
    def test_an_engine_goes_on_that_came_to_an_earlier_version_to_prepare_one(
        self, llm, store, monkeypatch, fails
    ):
        with (
            WeightDirectory.local() as directory,
            VllmWeights(llm, store=store, directory=directory) as weights,
        ):
            publisher = WeightPublisher(store, directory=directory)
            publisher.publish(model(1))
            some, states, get = {"a": model(2)["a"]}, [], store.get
            trainer = type(
                "Trainer", (), {"publish_weights": lambda _: publisher.publish(some, partial=True)}
            )()

            def breaks_later(ticket, timeout_s=None):
                if fails and weights.version is not None:
                    raise TransportError("the store is gone")
                return get(ticket, timeout_s)

            class Generator:
                def prepare_weights(self, version):
                    try:
                        return weights.prepare_weights(version, timeout_s=20)
                    finally:
                        states.append((weights.require(), llm.is_paused, llm.version))

                def apply_weights(self, version):
                    return weights.apply_weights(version, timeout_s=20)

            monkeypatch.setattr(store, "get", breaks_later)
            how = {"directory": directory, "prepare": "prepare_weights", "timeout_s": 20}
            with pytest.raises((BucketFetchError, LoadRefusedError), match=r"store is gone|publish it whole"):
                sync_weights(LocalPeers([trainer]), LocalPeers([Generator()]), **how)
            assert states == [(1, False, "1")] and not llm.is_paused
            assert same(llm.workers.held(), model(1))
            publisher.close()

    def test_a_forked_child_lets_the_engine_that_its_parent_pauses_be(
        self, llm, store, publisher, monkeypatch
    ):
        with VllmWeights(llm, store=store) as weights:
            update, load, refused = publisher.publish(model(1)), llm.update_weights, []

            def is_refused():
                before = list(llm.told)
                for ask in (
                    weights.pull,
                    partial(weights.prepare_weights, 1),
                    partial(weights.apply_weights, update),
                ):
                    with pytest.raises(TransportError, match="is that of process"):
                        ask()
                return llm.told == before and llm.is_paused

            def forks(request):
                refused.append(in_a_child(is_refused))
                load(request)

            monkeypatch.setattr(llm, "update_weights", forks)
            weights.apply_weights(update)
            assert refused == [True] and not llm.is_paused


class TestRequests:
    @pytest.mark.parametrize(
        ("requests", "mode"), [("continue", "keep"), ("finish", "wait"), ("abort", "abort")]
    )
    def test_an_engine_in_processes_of_its_own_is_told(self, factory, store, publisher, requests, mode):
        llm = Llm(factory, 2, in_process=False)
        with VllmWeights(llm, store=store, requests=requests) as weights:
            weights.apply_weights(publisher.publish(model(1)))
        assert llm.told[0] == f"pause 0 {mode}"

    @pytest.mark.parametrize(
        ("requests", "finished", "left"), [("continue", 0, 1), ("finish", 1, 0), ("abort", 0, 0)]
    )
    def test_in_one_process(self, factory, store, publisher, requests, finished, left):
        llm = Llm(factory)
        llm.left["under way"] = 3
        with VllmWeights(llm, store=store, requests=requests) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            assert len(weights.take_finished()) == finished
            assert weights.take_finished() == []
        assert len(llm.left) == left

    def test_an_engine_that_was_paused_before_stays_so(self, llm, store, publisher):
        llm.is_paused = True
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            assert llm.is_paused
            assert weights.require() == 1
            llm.is_paused = False
            weights.apply_weights(publisher.publish(model(2)))
            assert not llm.is_paused

    def test_requests_that_a_pause_holds_cannot_be_finished_first(self, factory, store, publisher):
        llm = Llm(factory)
        llm.left["under way"], llm.is_paused = 3, True
        with VllmWeights(llm, store=store, requests="finish") as weights:
            with pytest.raises(LoadRefusedError, match="the engine is paused"):
                weights.apply_weights(publisher.publish(model(1)))
            assert llm.told == []
            llm.is_paused = False
            weights.apply_weights(publisher.publish(model(2)))

    def test_of_an_asynchronous_engine(self, factory, store, publisher):
        engine = AsyncEngine(factory)
        with (
            running_loop() as loop,
            VllmWeights(engine, loop=loop, store=store, requests="finish") as weights,
        ):
            weights.apply_weights(publisher.publish(model(1)))
            assert same(engine.llm.workers.held(), model(1))
            assert engine.told[0] == "pause wait"
            assert engine.told[-1] == "resume"
            assert engine.llm.version == "1"

            async def on_the_loop():
                weights.apply_weights(publisher.publish(model(2)))

            with pytest.raises(Exception, match="event loop"):
                asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(10)

    @pytest.mark.timeout(60)
    @pytest.mark.filterwarnings("error")
    def test_of_an_asynchronous_engine_whose_loop_has_ended(self, factory, store, publisher):
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        with VllmWeights(AsyncEngine(factory), loop=loop, store=store) as weights:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            with pytest.raises(WeightUpdateError, match="the engine's event loop has ended"):
                weights.apply_weights(publisher.publish(model(1)))
        with pytest.raises(RuntimeError, match="the engine's event loop has ended"):
            VllmWeights(AsyncEngine(factory), loop=loop, store=store)
        loop.close()


class TestWhatIsRefused:
    def test_bad_arguments(self, factory, store):
        with pytest.raises(ValueError, match="'finish'"):
            VllmWeights(Llm(factory), requests="later", store=store)
        with pytest.raises(ValueError, match="rollback"):
            VllmWeights(Llm(factory), rollback="magic", store=store)
        with pytest.raises(TypeError, match=r"a vllm\.LLM or"):
            VllmWeights(object(), store=store)
        with pytest.raises(TypeError, match="loop="):
            VllmWeights(AsyncEngine(factory), store=store)

    def test_an_engine_whose_workers_do_not_answer(self, factory, store, monkeypatch):
        monkeypatch.setattr(Workers, "initialise", lambda *_: None)
        with pytest.raises(EngineLoadError, match="backend='raycrew'"):
            VllmWeights(Llm(factory), store=store)

    def test_a_worker_that_cannot_say_what_became_of_an_update(self, factory, store, publisher, monkeypatch):
        llm = Llm(factory, 2, in_process=False)
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            with monkeypatch.context() as patch:
                patch.setattr(llm.workers.engines[1], "_folder", "/no/such/folder")
                with pytest.raises(WeightUpdateError, match="1 of 2 workers of the engine answer") as caught:
                    weights.apply_weights(publisher.publish(model(2)))
            assert not caught.value.intact
            weights.apply_weights(publisher.publish(model(3)))
            assert same(llm.workers.held(), model(3))

    def test_nothing_is_left(self, llm, store, publisher, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with VllmWeights(llm, store=store) as weights:
            weights.apply_weights(publisher.publish(model(1)))
            assert list(tmp_path.iterdir())
        assert not list(tmp_path.iterdir())


class TestMailbox:
    def test_only_what_was_said_of_this_update_counts(self):
        box = Mailbox()
        tell(box.folder, Outcome(1, 0, 2, 10))
        tell(box.folder, Outcome(2, 1, 2, 11, "it broke"))
        assert box.read(2) == [Outcome(2, 1, 2, 11, "it broke")]
        box.close()
        box.close()

    def test_a_forked_child_leaves_it_alone(self):
        box = Mailbox()
        child = os.fork()
        if not child:
            box.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert Path(box.folder).is_dir()
        box.close()
        assert not Path(box.folder).exists()

    def test_what_killed_processes_left_is_removed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        kept = Mailbox()
        me, name = this_process(), Path(kept.folder).name
        gone = tmp_path / name.replace(f"-{me.pid}-{me.started}-", f"-{me.pid}-{me.started + 1}-")
        gone.mkdir()
        Mailbox().close()
        assert Path(kept.folder).is_dir()
        assert not gone.exists()
        kept.close()


def test_tied_embeddings_are_named_twice(factory):
    from raycrew.tensor_transport.integrations.vllm._loading import _with_head

    embeddings, other = torch.zeros(2), torch.ones(2)
    once = [("model.embed_tokens.weight", embeddings), ("model.norm.weight", other)]
    assert list(_with_head(iter(once))) == [*once, ("lm_head.weight", embeddings)]
    twice = [("lm_head.weight", other), *once]
    assert list(_with_head(iter(twice))) == twice
    assert list(_with_head(iter(once[1:]))) == once[1:]


class TestChecks:
    def test_references_are_greedy(self):
        table = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 5.0], [3.0, 0.0, 0.0]])
        (found,) = greedy_references(lambda ids: table[ids], [[0]], tokens=3)
        assert found.tokens == (1, 2, 0)
        assert found.logprobs[0] == pytest.approx(float(table[0].log_softmax(-1)[1]))

    def test_comparison(self):
        references = [GreedyReference((1,), (2, 3), (-1.0, -2.0))]
        assert compare_greedy(references, [([2, 3], [-1.0, -2.05])], 0.1) == pytest.approx(0.05)
        for answer in (([2, 4], [-1.0, -2.0]), ([2, 3], [-1.0, -2.5]), ([2, 3], [-1.0, float("nan")])):
            with pytest.raises(WeightCheckError, match="prompt 0"):
                compare_greedy(references, [answer], 0.1)


def test_nothing_of_vllm_is_imported_outside_its_processes():
    code = "import sys, raycrew.tensor_transport.integrations.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class AsyncEngine:
    """A `vllm.AsyncLLM`."""

    def __init__(self, factory):
        self.llm, self.told = Llm(factory, 2, in_process=False), []

    async def init_weight_transfer_engine(self, request):
        self.llm.workers.initialise(request.init_info)

    async def start_weight_update(self):
        self.llm.workers.ask("start_weight_update")

    async def update_weights(self, request):
        self.llm.workers.ask("update_weights", request.update_info)

    async def finish_weight_update(self):
        self.llm.workers.ask("finish_weight_update")

    async def is_paused(self):
        return False

    async def pause_generation(self, mode, clear_cache):
        assert not clear_cache
        self.told.append(f"pause {mode}")

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        assert reset_running_requests
        assert reset_connector
        return True

    async def reset_encoder_cache(self):
        self.told.append("reset")

    async def update_weight_version(self, version):
        self.llm.version = version

    async def resume_generation(self):
        self.told.append("resume")


class Concurrent(LocalPeers):
    """Objects that are called side by side, as they wait for each other."""

    def __init__(self, workers):
        super().__init__(workers)
        self.workers = workers

    def call(self, method, /, *args, **kwargs):
        answers = [None] * len(self.workers)

        def run(place, worker):
            try:
                answers[place] = getattr(worker, method)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised where the answers are read
                answers[place] = error

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return type("Results", (), {"get_results": lambda _, timeout=None: raise_first(answers)})()

    def on(self, ranks):
        return Concurrent([self.workers[rank] for rank in ranks])


def raise_first(answers):
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@contextlib.contextmanager
def running_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def refuse(*_, **__):
    raise TransportError("there is no room")


def raise_once_done(patch, llm, name, error):
    """Have a method do what it does, and raise all the same: once."""
    method = getattr(llm, name)

    def fails_once(**how):
        patch.setattr(llm, name, method)
        method(**how)
        raise error

    patch.setattr(llm, name, fails_once)


def fail_always(patch, llm):
    """Rank 0 takes one tensor, and no more."""
    worker = llm.workers.models[0]
    load = type(worker).load_weights

    def fail(weights):
        load(worker, [next(iter(weights))])
        raise ValueError("no room")

    patch.setattr(worker, "load_weights", fail, raising=False)


def fail_once(patch, llm):
    fail_always(patch, llm)
    fail, worker = llm.workers.models[0].load_weights, llm.workers.models[0]

    def once(weights):
        patch.undo()
        fail(weights)

    patch.setattr(worker, "load_weights", once)
