"""What goes wrong when what was made ready is exchanged: what is held comes back, by `load`."""

import threading

import pytest
from doubles import Generator
from models import assert_same, weights
from streaming import TIMEOUT_S, sync

from raycrew.tensor_transport.errors import LoadRefusedError, StaleWeightsError, WeightUpdateError

pytestmark = pytest.mark.hostile
PREPARED = {"prepare": "prepare_weights"}


def raises(error):
    raise error


@pytest.mark.parametrize("when", ["before", "half-way", "after"])
@pytest.mark.parametrize("rollback", ["shadow", "refetch", "none"])
@pytest.mark.parametrize("publish", ["publish_weights", "publish_mapping"])
def test_what_fails_in_the_exchange_comes_back_by_load(store, directory, trainer, rollback, when, publish):
    """It may have changed something before it takes a tensor: it had them all."""

    def exchange(given, tensors):
        assert not generator.receiver.intact, "nothing says which weights these are"
        if when == "half-way":
            next(tensors)
        if when == "after":
            list(tensors)
        generator.model.tensors["scale"] = given["scale"]
        raise RuntimeError("the engine is gone")

    generator = Generator(store, directory, rollback=rollback)
    sync([trainer], [generator], directory, publish=publish, **PREPARED)
    del generator.did[:]
    trainer.seed, generator.exchange = 1, exchange
    with pytest.raises(WeightUpdateError, match="the engine is gone"):
        sync([trainer], [generator], directory, publish=publish, **PREPARED)
    assert generator.receiver.version == 1
    if rollback == "none":
        assert generator.did == ["ahead"] and not generator.receiver.intact
    else:
        assert generator.did == ["ahead", "load"] and generator.receiver.intact
        assert_same(generator.model.tensors, weights())
    generator.exchange = generator.exchanged
    sync([trainer], [generator], directory, publish=publish, **PREPARED)
    assert_same(generator.model.tensors, weights(1))
    assert generator.receiver.intact


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_exchange_that_is_interrupted_leaves_a_mixture_that_the_next_one_repairs(
    store, directory, trainer, stop
):
    generator = Generator(store, directory, rollback="shadow")
    sync([trainer], [generator], directory, **PREPARED)
    trainer.seed, generator.exchange = 1, lambda given, tensors: raises(stop)
    trainer.publish_weights()
    generator.receiver.prepare(2)
    with pytest.raises(stop):
        generator.receiver.apply(2)
    assert not generator.receiver.intact and generator.receiver.version == 1
    with pytest.raises(StaleWeightsError):
        generator.receiver.tag(3)
    generator.receiver.pull()
    assert_same(generator.model.tensors, weights(1))
    assert generator.receiver.intact and generator.did == ["ahead", "exchange", "ahead", "load"]


@pytest.mark.parametrize("publish", ["publish_weights", "publish_mapping"])
def test_what_is_left_in_the_exchange_comes_back_too(store, directory, trainer, publish):
    generator = Generator(store, directory, rollback="shadow")
    sync([trainer], [generator], directory, publish=publish, **PREPARED)
    trainer.seed, generator.exchange = 1, lambda given, tensors: generator.model.tensors.update(given)
    with pytest.raises(WeightUpdateError, match="took 0 of 8 tensors"):
        sync([trainer], [generator], directory, publish=publish, **PREPARED)
    assert generator.did[-1] == "load" and generator.receiver.intact
    assert_same(generator.model.tensors, weights())


def test_an_exchange_that_is_refused_left_what_is_held(store, directory, trainer):
    generator = Generator(store, directory)
    sync([trainer], [generator], directory, **PREPARED)
    generator.exchange = lambda given, tensors: raises(LoadRefusedError("another engine by now"))
    with pytest.raises(LoadRefusedError, match="another engine by now"):
        sync([trainer], [generator], directory, **PREPARED)
    assert generator.receiver.intact and generator.receiver.version == 1
    assert generator.did == ["ahead", "exchange", "ahead"]


@pytest.mark.parametrize("rollback", ["shadow", "refetch"])
def test_a_version_that_is_given_up_after_the_exchange_comes_back_by_load(
    store, directory, trainer, rollback
):
    generators = [Generator(store, directory, rollback=rollback) for _ in range(2)]
    sync([trainer], generators, directory, **PREPARED)
    trainer.seed = 1
    generators[1].exchange = lambda given, tensors: raises(RuntimeError("no room"))
    with pytest.raises(WeightUpdateError):
        sync([trainer], generators, directory, **PREPARED)
    for generator in generators:
        assert generator.receiver.intact and generator.receiver.version == 1
        assert_same(generator.model.tensors, weights())
    assert generators[0].did == ["ahead", "exchange", "ahead", "exchange", "load"]


def test_a_version_that_is_given_up_before_the_exchange_is_not_exchanged(store, directory, trainer):
    generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
    sync([trainer], generators, directory, **PREPARED)
    trainer.seed, prepared = 1, threading.Event()
    prepare = generators[0].prepare_weights
    generators[0].prepare_weights = lambda version: (prepare(version), prepared.set())[0]
    generators[1].after = lambda n: prepared.wait(TIMEOUT_S) and raises(RuntimeError("no room"))
    with pytest.raises(WeightUpdateError, match="no room"):
        sync([trainer], generators, directory, **PREPARED)
    assert generators[0].did == ["ahead", "exchange", "ahead"]
    for generator in generators:
        assert generator.receiver.intact
        assert_same(generator.model.tensors, weights())
