"""Generators that have prepared a version: who can return to what is held loads it without asking."""

import threading

import pytest
from models import assert_same, weights
from streaming import Generator, Trainer, sync

from raycrew.tensor_transport.errors import UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory
from raycrew.tensor_transport.weights._directory import RecipientVersion, Record


class Overheard:
    """A directory, and what it is asked."""

    def __init__(self, directory):
        self._directory, self.asked = directory, []

    def ask(self, method, *args):
        self.asked.append(method.__name__)
        return self._directory.ask(method, *args)

    def tell(self, method, *args):
        self.asked.append(method.__name__)
        return self._directory.tell(method, *args)

    def wait(self, method, until, *args):
        return self.say_and_wait(None, method, until, *args)

    def say_and_wait(self, said, method, until, *args):
        self.asked.append(method.__name__)
        return self._directory.say_and_wait(said, method, until, *args)


def crew(**options):
    store, directory = InProcessByteStore(), WeightDirectory.local()
    heard = Overheard(directory)
    return store, directory, heard, Trainer(store, directory), Generator(store, heard, **options)


@pytest.mark.parametrize(
    ("rollback", "asked"),
    [("shadow", ["outcome"]), ("refetch", ["offer", "outcome"]), ("none", ["offer", "outcome"])],
)
def test_who_can_return_loads_what_it_prepared_without_asking(rollback, asked):
    _, directory, heard, trainer, generator = crew(rollback=rollback)
    apply = generator.apply_weights

    def listened(version):
        heard.asked.clear()
        return apply(version)

    generator.apply_weights = listened
    for seed in range(2):
        trainer.seed = seed
        sync([trainer], [generator], directory, prepare="prepare_weights")
        assert heard.asked == (asked if seed else ["offer", "outcome"]), (
            "at first there is nothing to return to"
        )
        assert_same(generator.model.tensors, weights(seed))


@pytest.mark.hostile
def test_what_was_prepared_and_given_up_is_forgotten_and_not_loaded():
    store, directory, _, trainer, generator = crew(rollback="shadow")
    other, loads = Generator(store, directory, rollback="shadow"), []
    generator.before_load = lambda: loads.append(1)
    sync([trainer], [generator, other], directory, prepare="prepare_weights")
    trainer.seed, prepare, prepared = 1, other.prepare_weights, threading.Event()
    generator.prepare_weights = lambda version, prepares=generator.prepare_weights: (
        prepares(version),
        prepared.set(),
    )[0]

    def fails(version):
        prepare(version)
        assert prepared.wait(20.0), "what is given up earlier was never prepared"
        raise RuntimeError("no room")

    other.prepare_weights = fails
    with pytest.raises(RuntimeError, match="no room"):
        sync([trainer], [generator, other], directory, prepare="prepare_weights")
    assert generator.events[-2:] == ["prepare", "apply"] and len(loads) == 1
    assert generator.receiver._applier._prepared is None and generator.receiver.intact
    assert_same(generator.model.tensors, weights(0))
    other.prepare_weights = prepare
    sync([trainer], [generator, other], directory, prepare="prepare_weights")
    assert_same(generator.model.tensors, weights(1))


@pytest.mark.hostile
def test_what_is_given_up_while_generators_pause_is_not_loaded():
    store, directory, _, trainer, generator = crew(rollback="shadow")
    other, loads = Generator(store, directory, rollback="shadow"), []
    generator.before_load = other.before_load = lambda: loads.append(1)
    sync([trainer], [generator, other], directory, prepare="prepare_weights")
    publish = trainer.publish_weights

    def fails():
        published = publish()
        assert paused.wait(20.0)
        raise RuntimeError(f"the trainer has no room after {published.version}")

    paused, failed = threading.Event(), threading.Event()
    trainer.publish_weights = fails
    generator.stop = lambda: (paused.set(), failed.wait(20.0))
    heard = Overheard(directory)
    abort = heard.ask

    def ask(method, *args):
        found = abort(method, *args)
        if method is Record.dismiss:
            failed.set()
        return found

    heard.ask = ask
    with pytest.raises(RuntimeError, match="the trainer has no room after 2"):
        sync([trainer], [generator, other], heard, prepare="prepare_weights")
    assert len(loads) == 2 and generator.receiver.version == other.receiver.version == 1


@pytest.mark.hostile
def test_who_prepared_what_nobody_votes_for_asks_whether_it_is_there():
    _, _, heard, trainer, generator = crew(rollback="shadow")
    trainer.publish_weights()
    generator.receiver.pull()
    trainer.publish_weights()
    generator.receiver.prepare(2)
    heard.asked.clear()
    generator.receiver.apply(2)
    assert heard.asked[0] == "offer" and generator.receiver.version == 2


def test_a_version_that_is_over_says_so_to_whoever_is_told():
    version = RecipientVersion(3, "mine")
    assert not version.is_over and version.given_up.is_over
    assert version.given_up == 3 and version.given_up.ballot == "mine"
    _, _, heard, _, generator = crew()
    with pytest.raises(UpdateAbortedError, match="version 3 was given up"):
        generator.receiver.apply(version.given_up)
    assert heard.asked == ["vote"]
