"""The driver's side of weight updates, with groups of plain objects."""

import asyncio
import collections.abc
import inspect
import threading
import time
import typing

import pytest
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.testing._fakes import LocalResults
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    WeightSyncReport,
    gather_weights,
    sync_weights,
    sync_weights_async,
)
from raycrew.tensor_transport.weights._syncing import calling
from raycrew.tensor_transport.weights._syncing.calling import Calls


@pytest.fixture
def store():
    return InProcessByteStore()


class Trainer:
    def __init__(self, store, rank, directory=None):
        self.publisher = WeightPublisher(store, directory=directory) if rank == 0 else None
        self.seed = 0

    def publish_weights(self):
        if self.publisher is None:
            list(gather_weights(weights(self.seed)))
            return None
        return self.publisher.publish(weights(self.seed))

    def latest(self):
        return self.publisher and self.publisher.latest


class Generator:
    def __init__(self, store, directory=None):
        self.model, self.events = Model(), []
        self.load = self.model.load
        self.receiver = WeightReceiver(lambda tensors: self.load(tensors), store=store, directory=directory)
        self.broken = set()

    def apply_weights(self, update):
        self.events.append("apply")
        return self.receiver.apply(update)

    def stop(self):
        self.act("stop")

    def go(self):
        self.act("go")

    def act(self, name):
        if name in self.broken:
            raise RuntimeError(f"{name} failed")
        self.events.append(name)


@pytest.fixture
def crew(store):
    trainers, generators = [Trainer(store, 0), Trainer(store, 1)], [Generator(store), Generator(store)]
    return trainers, generators


def test_sync_weights(crew):
    trainers, generators = crew
    before = time.time()
    report = sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    assert before <= report.started_at <= time.time()
    assert report.version == 1 and len(report.receipts) == 2
    assert report.size_bytes == trainers[0].publisher.latest.size_bytes
    assert 0 < report.pause_s <= report.total_s
    for generator in generators:
        assert generator.events == ["stop", "apply", "go"]
        assert_same(generator.model.tensors, weights(0))


def test_sync_resumes_after_a_failure_and_can_be_repeated(crew, store):
    trainers, generators = crew
    broken = generators[1]
    broken.load = lambda tensors: 1 / 0
    with pytest.raises(WeightUpdateError, match="ZeroDivisionError") as caught:
        sync_weights(LocalPeers(trainers), LocalPeers(generators), resume="go")
    assert "did not reach every generator" in caught.value.__notes__[-1]
    assert [g.events[-1] for g in generators] == ["go", "go"]
    assert [g.receiver.version for g in generators] == [1, None]
    broken.load = broken.model.load
    report = sync_weights(LocalPeers(trainers[:1]), LocalPeers(generators), publish="latest")
    assert report.version == 1
    assert [r.size_bytes > 0 for r in report.receipts] == [False, True]


@pytest.mark.hostile
@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_whose_causes_go_in_a_circle_is_raised(crew, streams):
    trainers, generators = crew
    odd, told = RuntimeError("odd"), ValueError("told")
    odd.__cause__, told.__context__ = told, odd  # as of an error that is raised again without its messenger

    def fail(*_):
        raise told

    for each in (*trainers, *generators):
        each.apply_weights = each.publish_weights = fail
    if not streams:
        del trainers[0].publish_weights
    with pytest.raises(ValueError, match="told"), WeightDirectory.local() as directory:
        options = {"directory": directory} if streams else {}
        sync_weights(LocalPeers(trainers[:1]), LocalPeers(generators), **options)


class Held(LocalPeers):
    """A group of which some ranks can't be called as long as an event isn't set."""

    def __init__(self, workers, held, free):
        super().__init__(workers)
        self.held, self.free = held, free

    def on(self, *, ranks):
        found = Held((), self.held, self.free)
        found._workers = super().on(ranks=ranks)._workers
        return found

    def call(self, method, /, *args, **kwargs):
        if method == "apply_weights" and self.held & self._workers.keys():
            assert self.free.wait(60)
            return super().call(method, *args, **kwargs)
        return Later(lambda: super(Held, self).call(method, *args, **kwargs))


class Later:
    """Results of a call that runs once they are asked for."""

    def __init__(self, call):
        self.get_results = lambda *, timeout=None: call().get_results()


@pytest.mark.hostile
def test_ranks_do_not_wait_for_one_that_can_not_be_called_until_they_have_ended(store, monkeypatch):
    monkeypatch.setattr(calling, "HELD_UP_S", 0.2)
    with WeightDirectory.local() as directory:
        trainer, generators = Trainer(store, 0, directory), [Generator(store, directory) for _ in range(2)]
        ended = threading.Event()
        first = generators[0]
        first.apply_weights = lambda version: ended_after(lambda: first.receiver.apply(version), ended)
        with pytest.raises(UpdateAbortedError, match=r"could not be called within 0\.2 s"):
            sync_weights(
                LocalPeers([trainer]), Held(generators, {1}, ended), directory=directory, timeout_s=60.0
            )
        assert ended.is_set()


def ended_after(call, event):
    try:
        return call()
    finally:
        event.set()


def test_sync_refuses_none_or_several_publishers(crew, store):
    trainers, generators = crew
    with pytest.raises(WeightUpdateError, match="exactly one rank; got 0 updates"):
        sync_weights(LocalPeers(trainers[1:]), LocalPeers(generators))
    with pytest.raises(WeightUpdateError, match="exactly one rank; got 2 updates"):
        sync_weights(LocalPeers([Trainer(store, 0), Trainer(store, 0)]), LocalPeers(generators))


def test_sync_refuses_generators_that_report_another_version(crew):
    trainers, generators = crew
    early = trainers[0].publish_weights()
    receipt = generators[0].receiver.apply(early)
    generators[0].apply_weights = lambda update: receipt
    with pytest.raises(WeightUpdateError, match=r"other versions than 2: \{0: 1\}"):
        sync_weights(LocalPeers(trainers), LocalPeers(generators))


@pytest.mark.hostile
@pytest.mark.parametrize("answer", [None, 1])
def test_sync_does_not_take_the_silence_of_a_generator_for_its_version(crew, answer):
    trainers, generators = crew
    generators[1].apply_weights = lambda update: answer
    with pytest.raises(WeightUpdateError, match=r"receipt on every generator; got \[.*Receipt.*, (None|1)\]"):
        sync_weights(LocalPeers(trainers), LocalPeers(generators))


def breaks_while_loading(tensors):
    next(iter(tensors))
    raise RuntimeError("no room")


@pytest.mark.hostile
def test_ranks_that_were_paused_go_on_when_the_pause_of_another_failed(crew):
    trainers, generators = crew
    generators[1].broken.add("stop")
    with pytest.raises(RuntimeError, match="stop failed") as caught:
        sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    assert [g.events for g in generators] == [["stop", "go"], ["go"]]
    assert caught.value.__notes__ == [
        "rank 1 failed: weight update 1 did not reach every generator; it can be applied again"
    ]


@pytest.mark.hostile
def test_a_rank_with_a_mixture_stays_paused_until_an_update_reaches_it(crew):
    trainers, generators = crew
    sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    broken = generators[1]
    broken.load = breaks_while_loading
    with pytest.raises(WeightUpdateError, match="no room") as caught:
        sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    assert not broken.receiver.intact
    assert generators[0].events[-3:] == ["stop", "apply", "go"]
    assert generators[1].events[-2:] == ["stop", "apply"]
    assert any(
        "rank 1 is not resumed: its weights are, or may be, a mixture" in n for n in caught.value.__notes__
    )
    broken.load = broken.model.load
    sync_weights(LocalPeers(trainers), LocalPeers(generators), publish="latest", pause="stop", resume="go")
    assert [g.events[-1] for g in generators] == ["go", "go"]


@pytest.mark.hostile
def test_a_rank_that_does_not_say_whether_it_is_intact_is_not_resumed(crew):
    trainers, generators = crew

    def dies(update):
        raise TimeoutError("no answer")

    def wrapped(update):
        raise RuntimeError("the engine says") from WeightUpdateError("damaged", intact=False)

    def before_it_began(update):
        raise RuntimeError("the engine says") from WeightUpdateError("damaged", intact=True)

    for apply, resumed in ((dies, False), (wrapped, False), (before_it_began, True)):
        generators[0].apply_weights, generators[0].events = apply, []
        with pytest.raises((TimeoutError, RuntimeError)):
            sync_weights(LocalPeers(trainers), LocalPeers(generators), resume="go")
        assert generators[0].events == ["go"] * resumed
        assert generators[1].events[-1] == "go"


@pytest.mark.hostile
def test_every_failure_is_told_and_the_first_is_raised(crew):
    trainers, generators = crew
    for generator in generators:
        generator.load = lambda tensors: 1 / 0
    generators[1].broken.add("go")
    with pytest.raises(WeightUpdateError) as caught:
        sync_weights(LocalPeers(trainers), LocalPeers(generators), resume="go")
    notes = "\n".join(caught.value.__notes__)
    assert "go() failed on rank 1: RuntimeError('go failed')" in notes
    assert "rank 1 failed, too: WeightUpdateError" in notes
    assert generators[0].events[-1] == "go"


@pytest.mark.hostile
def test_a_resumption_that_fails_is_raised_without_blaming_the_update(crew):
    trainers, generators = crew
    generators[1].broken.add("go")
    with pytest.raises(RuntimeError, match="go failed") as caught:
        sync_weights(LocalPeers(trainers), LocalPeers(generators), resume="go")
    assert not any("did not reach" in note for note in caught.value.__notes__)
    assert [g.receiver.version for g in generators] == [1, 1]


@pytest.mark.hostile
@pytest.mark.parametrize("phase", ["pause", "apply", "resume"])
def test_ranks_go_on_when_progress_raises(crew, phase):
    trainers, generators = crew

    def progress(step):
        if step.phase == phase:
            raise RuntimeError("no display")

    peers = LocalPeers(trainers), LocalPeers(generators)
    with pytest.raises(RuntimeError, match="no display"):
        sync_weights(*peers, pause="stop", resume="go", progress=progress)
    for generator in generators:
        assert generator.events == ["stop"] + ["apply"] * (phase != "pause") + ["go"]
        assert generator.receiver.version == (None if phase == "pause" else 1)
    report = sync_weights(*peers, publish="latest", pause="stop", resume="go")
    assert report.version == 1


class Impatient(LocalPeers):
    """Somebody presses Ctrl-C so often while the answers of a method are waited for."""

    def __init__(self, workers, method, presses=1):
        super().__init__(workers)
        self.method, self.left = method, [presses]

    def on(self, *, ranks):
        found = Impatient((), self.method)
        found._workers, found.left = super().on(ranks=ranks)._workers, self.left
        return found

    def call(self, method, /, *args, **kwargs):
        results = super().call(method, *args, **kwargs)
        return Pressed(results, self.left) if method == self.method else results


class Pressed:
    def __init__(self, results, left):
        self.results, self.left = results, left

    def get_results(self, *, timeout=None):
        if self.left[0]:
            self.left[0] -= 1
            raise KeyboardInterrupt
        return self.results.get_results(timeout=timeout)


@pytest.mark.hostile
@pytest.mark.parametrize("method", ["stop", "apply_weights"])
def test_ranks_go_on_when_the_driver_is_interrupted(crew, method):
    trainers, generators = crew
    peers = Impatient(generators, method)
    with pytest.raises(KeyboardInterrupt):
        sync_weights(LocalPeers(trainers), peers, pause="stop", resume="go")
    for generator in generators:
        assert [generator.events[0], generator.events[-1]] == ["stop", "go"]


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["another's pause fails", "the driver is interrupted"])
def test_a_rank_with_a_mixture_stays_paused_when_the_next_update_ends_before_it_reaches_it(crew, how):
    trainers, generators = crew
    trainer, peers = LocalPeers(trainers), Impatient(generators, "stop", presses=0)
    generators[1].load = breaks_while_loading
    with pytest.raises(WeightUpdateError, match="no room"):
        sync_weights(trainer, peers, pause="stop", resume="go")
    if how == "the driver is interrupted":
        peers.left[0] = 1
    else:
        generators[0].broken.add("stop")
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
        sync_weights(trainer, peers, pause="stop", resume="go")
    assert [g.receiver.intact for g in generators] == [True, False]
    assert generators[0].events[-1] == "go"
    assert generators[1].events[-2:] == ["apply", "stop"]
    assert any("rank 1 is not resumed: its weights are" in note for note in caught.value.__notes__)
    generators[0].broken.clear()
    generators[1].load = generators[1].model.load
    sync_weights(trainer, peers, pause="stop", resume="go")
    assert [g.events[-1] for g in generators] == ["go", "go"]
    generators[0].broken.add("stop")
    with pytest.raises(RuntimeError, match="stop failed"):
        sync_weights(trainer, peers, pause="stop", resume="go")
    assert generators[1].events[-2:] == ["stop", "go"], "an update has reached it since"


class Unhashable(LocalPeers):
    """A group that can't be remembered from one update to the next."""

    __hash__ = None


@pytest.mark.hostile
def test_a_group_without_a_hash_is_updated_as_others(crew):
    trainers, generators = crew
    generators[1].load = breaks_while_loading
    with pytest.raises(WeightUpdateError, match="no room"):
        sync_weights(LocalPeers(trainers), Unhashable(generators), pause="stop", resume="go")
    assert [g.events[-1] for g in generators] == ["go", "apply"]


@pytest.mark.hostile
def test_ranks_of_which_nobody_knows_stay_paused_when_the_driver_is_interrupted_for_good(crew):
    trainers, generators = crew
    peers = Impatient(generators, "apply_weights", presses=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        sync_weights(LocalPeers(trainers), peers, pause="stop", resume="go")
    assert [g.events for g in generators] == [["stop", "apply"]] * 2
    assert sum("is not resumed" in note for note in caught.value.__notes__) == 2
    sync_weights(LocalPeers(trainers), peers, publish="latest", pause="stop", resume="go")
    assert [g.events[-1] for g in generators] == ["go", "go"]


@pytest.mark.hostile
def test_a_rank_that_is_interrupted_itself_stays_paused(crew):
    """As where the ranks are objects of the driver's own process."""
    trainers, generators = crew

    def interrupted(tensors):
        next(tensors)
        raise KeyboardInterrupt

    sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    generators[0].load, trainers[0].seed = interrupted, 1
    with pytest.raises(KeyboardInterrupt):
        sync_weights(LocalPeers(trainers), LocalPeers(generators), pause="stop", resume="go")
    assert generators[0].events[-1] == "apply"
    assert not generators[0].receiver.intact
    assert generators[1].events[-2:] == ["stop", "go"]
    assert generators[1].receiver.version == 1


def test_the_form_to_be_awaited_takes_and_checks_the_same_arguments(crew):
    groups = [LocalPeers(workers) for workers in crew]
    assert list(inspect.signature(sync_weights_async).parameters) == [
        *inspect.signature(sync_weights).parameters
    ]
    hints = [typing.get_type_hints(form) for form in (sync_weights, sync_weights_async)]
    assert [hint.pop("return") for hint in hints] == [
        WeightSyncReport,
        collections.abc.Coroutine[typing.Any, typing.Any, WeightSyncReport],
    ]
    assert hints[0] == hints[1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'puase'"):
        sync_weights_async(*groups, puase="stop")  # Nothing is awaited.
    with pytest.raises(ValueError, match="give directory=, too"):
        sync_weights_async(*groups, prepare="prepare_weights")
    assert asyncio.run(sync_weights_async(*groups, pause="stop", resume="go")).version == 1


class Declared(LocalPeers):
    """A group whose methods say how the results of a call on all of it are joined."""

    def call(self, method, /, *args, **kwargs):
        results = super().call(method, *args, **kwargs).results
        return LocalResults(next(result for result in results if result is not None))


@pytest.mark.hostile
@pytest.mark.parametrize("directed", [True, False])
def test_what_a_trainer_declares_about_its_method_does_not_count(store, directed):
    directory = WeightDirectory.local() if directed else None
    trainers = [Trainer(store, rank, directory) for rank in range(2)]
    generators = [Generator(store, directory)]
    report = sync_weights(Declared(trainers), LocalPeers(generators), directory=directory, timeout_s=60)
    assert report.version == 1
    assert_same(generators[0].model.tensors, weights(0))


def test_calls_say_how_they_are_started_and_answered():
    with pytest.raises(TypeError, match="abstract"):
        Calls({}, "apply_weights", lambda _: (), None)
