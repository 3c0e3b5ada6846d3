"""Updates that are interrupted, cancelled, disturbed by others, or asked about while they go on."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch
from models import assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, sync

from raycrew.tensor_transport.errors import (
    TransportTimeoutError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    sync_weights_async,
)
from raycrew.tensor_transport.weights._directory import Record
from raycrew.tensor_transport.weights._receiving.fetching import Fetched, Parcel
from raycrew.tensor_transport.weights._receiving.rollback import RefetchRollback
from raycrew.tensor_transport.weights._update import Bucket, TensorEntry


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    with WeightDirectory.local() as directory:
        yield directory


@pytest.mark.hostile
@pytest.mark.parametrize("phase", ["prepare", "pause", "apply"])
def test_generators_go_on_when_progress_raises(store, directory, phase):
    trainer, generators = Trainer(store, directory), [Generator(store, directory) for _ in range(2)]
    sync([trainer], generators, directory)

    def progress(step):
        if step.phase == phase:
            raise RuntimeError("no display")

    trainer.seed = 1
    with pytest.raises(RuntimeError, match="no display"):
        sync([trainer], generators, directory, progress=progress, prepare="prepare_weights")
    held = {g.receiver.version for g in generators}
    assert held == ({2} if phase == "apply" else {1}), (
        "the first to tell of the loading tells what was decided"
    )
    for generator in generators:
        assert_same(generator.model.tensors, weights(max(held) - 1))
        assert generator.events.count("stop") == generator.events.count("go")
    sync([trainer], generators, directory, prepare="prepare_weights")
    for generator in generators:
        assert_same(generator.model.tensors, weights(1))


@pytest.mark.hostile
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_update_that_is_cancelled_while_its_number_is_asked_for_does_not_go_on(store, directory, when):
    trainer, generator = Trainer(store, directory), Generator(store, directory)
    asked, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(WeightDirectory):
        def ask(self, method, /, *args):
            if method is not Record.reserve:
                return super().ask(method, *args)
            number = super().ask(method, *args) if when == "after" else None
            asked.set()
            go_on.wait(TIMEOUT_S)
            try:
                return number or super().ask(method, *args)
            finally:
                ended.set()

    async def run():
        options = {"pause": "stop", "resume": "go", "directory": Slow(directory._edge)}
        peers = (LocalPeers([trainer]), LocalPeers([generator]))
        task = asyncio.create_task(sync_weights_async(*peers, **options, timeout_s=TIMEOUT_S))
        await asyncio.to_thread(asked.wait, TIMEOUT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    go_on.set()
    ended.wait(TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "weight-sync":
            thread.join(TIMEOUT_S)
    assert [s.reason for s in directory.status()] == ["the synchronisation was cancelled"]
    assert generator.events == []


@pytest.mark.hostile
def test_a_generator_that_is_restarted_while_it_waits_has_one_vote(store, directory):
    """What it loaded before it died counts no more, and never in the place of what others load."""
    listening, voted, twice = threading.Event(), threading.Event(), threading.Event()

    class Heard(WeightDirectory):
        def say_and_wait(self, said, method, until, /, *args):
            if said is not None:
                self.ask(said[0], *said[1])
            if said is not None and said[0] is Record.vote and listening.is_set():
                (twice if voted.is_set() else voted).set()
            return super().say_and_wait(None, method, until, *args)

    heard = Heard(directory._edge)
    trainer = Trainer(store, directory)
    generators = [Generator(store, each, rollback="shadow") for each in (heard, directory)]
    sync([trainer], generators, directory)
    restarted = Generator(store, heard, rollback="shadow")
    restarted.receiver.pull()
    listening.set()
    first = generators[0].apply_weights

    def dies(version):
        with pytest.raises(UpdateAbortedError):
            first(version)

    def apply_again(version):
        dying = threading.Thread(target=dies, args=(version,))
        dying.start()
        voted.wait(TIMEOUT_S)
        try:
            return restarted.apply_weights(version)
        finally:
            dying.join(TIMEOUT_S)

    def fails():
        twice.wait(TIMEOUT_S)
        raise MemoryError("no room")

    generators[0].apply_weights, generators[1].before_load, trainer.seed = apply_again, fails, 1
    with pytest.raises(WeightUpdateError, match="no room"):
        sync([trainer], generators, directory)
    assert directory.latest == 1
    for generator in (restarted, generators[1]):
        assert generator.receiver.version == 1 and generator.receiver.intact
        assert_same(generator.model.tensors, weights(0))


@pytest.mark.hostile
def test_what_somebody_else_publishes_meanwhile_is_kept_by_no_generator(store, directory):
    trainer, generator = Trainer(store, directory), Generator(store, directory, rollback="shadow")
    sync([trainer], [generator], directory)
    theirs = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}

    class Disturbed:
        def publish_weights(self):
            trainer.publisher.publish(theirs)
            return trainer.publish_weights()

    trainer.seed = 1
    with pytest.raises(WeightUpdateError, match="let nobody else publish meanwhile"):
        sync([Disturbed()], [generator], directory)
    assert generator.receiver.version == 1 and generator.receiver.intact
    assert_same(generator.model.tensors, weights(0))
    assert generator.events[-1] == "go"
    sync([trainer], [generator], directory)
    assert_same(generator.model.tensors, weights(1))


@pytest.mark.hostile
def test_rows_are_not_tagged_while_a_version_is_loaded_or_not_decided(store, directory):
    seen, listening = [], threading.Event()

    class Heard(WeightDirectory):
        def say_and_wait(self, said, method, until, /, *args):
            if said is not None and said[0] is Record.vote and listening.is_set():
                look("not decided")
            return super().say_and_wait(said, method, until, *args)

    trainer = Trainer(store, directory)
    generators = [Generator(store, each) for each in (Heard(directory._edge), directory)]
    sync([trainer], generators, directory)
    receiver, model = generators[0].receiver, generators[0].model
    plainly = model.load

    def look(when):
        with pytest.raises(WeightUpdateError, match="version 2 is being loaded, is not decided"):
            receiver.tag(3)
        seen.append((when, receiver.version, receiver.intact))

    def load(tensors):
        assert receiver.tag(1).tolist() == [1], "nothing was loaded yet"
        first = next(tensors)
        look("loading")
        plainly([first, *tensors])

    model.load, trainer.seed = load, 1
    listening.set()
    sync([trainer], generators, directory)
    assert seen == [("loading", 1, False), ("not decided", 1, False)]
    assert receiver.intact
    assert receiver.tag(2).tolist() == [2, 2]


@pytest.mark.hostile
def test_a_rollback_that_fetches_has_a_deadline(store):
    class Stuck:
        """Answers for a while, and then only those who wait for ever."""

        is_stuck = False

        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, ticket, timeout_s=None):
            if not self.is_stuck:
                return store.get(ticket, timeout_s)
            deadlines.append(timeout_s)
            raise TransportTimeoutError("it does not answer")

    directory, deadlines, stuck = WeightDirectory.local(keep=2), [], Stuck()
    trainer = Trainer(store, directory)
    generator = Generator(stuck, directory, rollback="refetch")
    trainer.publish_weights()
    generator.receiver.pull()

    def fails(tensors):
        next(tensors)
        stuck.is_stuck = True
        raise MemoryError("no room")

    generator.model.load = fails
    trainer.seed = 1
    trainer.publish_weights()
    with pytest.raises(WeightUpdateError) as caught:
        generator.receiver.pull(timeout_s=TIMEOUT_S)
    assert any("returning to version 1 failed, too" in note for note in caught.value.__notes__)
    assert not generator.receiver.intact
    assert deadlines
    assert None not in deadlines


@pytest.mark.hostile
def test_an_update_that_failed_before_the_trainer_published_is_held_by_nobody(store, directory):
    trainer, generators = Trainer(store, directory), [Generator(store, directory) for _ in range(2)]
    sync([trainer], generators, directory)
    plainly = generators[0].prepare_weights

    def fails(version):
        raise MemoryError("no room")

    class Late:
        def publish_weights(self):
            directory.wait(Record.decision, TIMEOUT_S, 2)
            return trainer.publish_weights()

    generators[0].prepare_weights, trainer.seed = fails, 1
    with pytest.raises(MemoryError, match="no room"):
        sync([Late()], generators, directory, prepare="prepare_weights")
    assert directory.latest == 1
    late = Generator(store, directory)
    assert late.receiver.pull().version == 1
    assert_same(late.model.tensors, weights(0))
    generators[0].prepare_weights = plainly
    assert sync([trainer], generators, directory, prepare="prepare_weights").version == directory.latest
    assert_same(generators[0].model.tensors, weights(1))


@pytest.mark.hostile
def test_an_update_goes_through_after_one_whose_trainer_failed_before_it_published(store, directory):
    trainer, generator = Trainer(store, directory), Generator(store, directory)

    class Fails:
        def publish_weights(self):
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        sync([Fails()], [generator], directory)
    sync([trainer], [generator], directory)
    assert_same(generator.model.tensors, weights(0))


@pytest.mark.hostile
@pytest.mark.parametrize("where", ["prepare", "pause", "stop"])
def test_what_was_prepared_of_an_interrupted_update_is_not_kept(store, directory, where):
    fetched = []

    class Watched:
        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, ticket, timeout_s=None):
            data = store.get(ticket, timeout_s).copy()
            fetched.append(weakref.ref(data))
            return data

    trainer = Trainer(store, directory)
    generators = [Generator(Watched(), directory, borrow=True) for _ in range(2)]

    def progress(step):
        if step.phase == where:
            raise RuntimeError("no display")

    def stop():
        if where == "stop":
            raise RuntimeError("it does not stop")

    generators[0].stop = stop
    with pytest.raises(RuntimeError):
        sync([trainer], generators, directory, progress=progress, prepare="prepare_weights")
    gc.collect()
    assert fetched
    assert [data() for data in fetched if data() is not None] == []


@pytest.mark.hostile
def test_a_rollback_that_fetches_says_what_did_not_come_back():
    entry = TensorEntry("x", "uint8", (4,), 0, 0, 4)
    rollback = RefetchRollback(lambda version: iter(()))
    rollback.committed(1, [Fetched(Parcel(0, "1", Bucket(None, 4, None), [entry]), bytearray(4))])
    with pytest.raises(WeightUpdateError, match=r"\['x'\] are not in the versions"):
        list(rollback.weights(frozenset("x")))


@pytest.mark.hostile
def test_nobody_waits_for_the_vote_of_a_receiver_that_was_made_again(store, directory):
    trainer = Trainer(store, directory)
    healthy, dying = (Generator(store, directory, rollback="shadow", name=name) for name in "ab")
    sync([trainer], [healthy, dying], directory)
    decisions, load = [], dying.model.load

    def dies_once_it_has_taken_all(tensors):
        load(tensors)
        if not decisions:
            Generator(store, directory, name="b")
            decisions.append(directory.ask(Record.decision, 2))

    dying.model.load, trainer.seed = dies_once_it_has_taken_all, 1
    with pytest.raises(UpdateAbortedError, match="receiver b was made again"):
        sync([trainer], [healthy, dying], directory)
    assert decisions == ["aborted"]
    assert healthy.receiver.require() == 1
    assert_same(healthy.model.tensors, weights(0))
    assert sync([trainer], [healthy, dying], directory).version == 3
