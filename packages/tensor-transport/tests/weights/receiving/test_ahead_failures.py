"""What goes wrong while something is made ready of weights: what is held stays."""

import asyncio
import threading
import time

import pytest
import torch
from doubles import Generator, await_no_fetching
from models import assert_same, weights
from streaming import TIMEOUT_S, sync

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    ChecksumMismatchError,
    LoadRefusedError,
    TransportClosedError,
    TransportError,
    WeightUpdateError,
)
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightPublisher

pytestmark = pytest.mark.hostile
PREPARED = {"prepare": "prepare_weights"}
MODEL = {f"layers.{i}": torch.full((64,), float(i)) for i in range(6)}
STOPS = [RuntimeError, KeyboardInterrupt, asyncio.CancelledError, SystemExit]


def raises(error):
    raise error


def fails_at(nth, stop, generator):
    """From now on what is made ready fails at a tensor."""
    generator.after = lambda n: raises(stop) if n == nth else None


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("nth", [0, 4, 7])
@pytest.mark.parametrize("publish", ["publish_weights", "publish_mapping"])
def test_what_is_held_stays_where_nothing_could_be_made_ready(store, directory, trainer, stop, nth, publish):
    generator = Generator(store, directory)
    sync([trainer], [generator], directory, publish=publish, **PREPARED)
    trainer.seed = 1
    fails_at(nth, stop("no room"), generator)
    with pytest.raises(WeightUpdateError if stop is RuntimeError else stop, match="no room") as caught:
        sync([trainer], [generator], directory, publish=publish, **PREPARED)
    await_no_fetching()  # also while what was raised is held
    assert caught.value.__traceback__
    assert generator.receiver.intact and generator.receiver.version == 1
    assert_same(generator.model.tensors, weights())
    generator.after = lambda n: None
    sync([trainer], [generator], directory, publish=publish, **PREPARED)
    assert_same(generator.model.tensors, weights(1))
    assert generator.did == ["ahead", "exchange", "ahead", "ahead", "exchange"]


def test_what_it_raises_says_which_version_and_what_is_held(store, directory, trainer):
    generator = Generator(store, directory)
    fails_at(0, RuntimeError("no room"), generator)
    trainer.publish_weights()
    with pytest.raises(
        WeightUpdateError, match=r"update 1: ahead\(\) raised RuntimeError\('no room'\)"
    ) as told:
        generator.receiver.prepare(1)
    assert told.value.version == 1 and told.value.intact and isinstance(told.value.__cause__, RuntimeError)
    fails_at(0, LoadRefusedError("not this one"), generator)
    with pytest.raises(LoadRefusedError, match="not this one"):
        generator.receiver.prepare(1)


@pytest.mark.parametrize("made", [7, {}, iter(())])
def test_what_cannot_be_called_is_refused_when_it_is_returned(store, directory, trainer, made):
    generator = Generator(store, directory, ahead=lambda tensors: (list(tensors), made)[1])
    trainer.publish_weights()
    with pytest.raises(WeightUpdateError, match=rf"ahead\(\) returned a {type(made).__name__}, no callable"):
        generator.receiver.prepare(1)
    assert generator.receiver.intact


def test_a_generator_function_makes_nothing_ready_and_is_refused(store, directory, trainer):
    def ahead(tensors):
        yield from tensors

    trainer.publish_weights()
    with pytest.raises(WeightUpdateError, match="returned a generator, no callable"):
        Generator(store, directory, ahead=ahead).receiver.prepare(1)


@pytest.mark.parametrize("hushes", [True, False])
@pytest.mark.parametrize("harm", ["lose", "damage"])
@pytest.mark.parametrize("nth", [0, 2, 5])
def test_a_bucket_that_is_lost_or_damaged_is_told_whatever_it_makes_of_it(
    store, directory, harm, hushes, nth
):
    def ahead(tensors):
        found = []
        try:
            found.extend(tensors)
        except Exception as error:
            if not hushes:
                raise RuntimeError("something is wrong") from error
        return list

    publisher = WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=TIMEOUT_S)
    generator = Generator(store, directory, ahead=ahead)
    publisher.publish(iter(MODEL.items()))
    store.release(nth) if harm == "lose" else store.damage(nth)
    with pytest.raises(BucketFetchError if harm == "lose" else ChecksumMismatchError) as told:
        generator.receiver.prepare(1)
    assert told.value.bucket == nth and told.value.intact and told.value.version == 1
    await_no_fetching()
    publisher.publish(iter(MODEL.items()))
    generator.receiver.prepare(2)
    assert generator.receiver.apply(2).version == 2


def test_it_cannot_call_the_receiver(store, directory, trainer):
    said = []

    def ahead(tensors):
        for call in (lambda: generator.receiver.apply(1), generator.receiver.pull, generator.receiver.close):
            with pytest.raises(TransportError, match=r"by the load\(\) or ahead\(\) that it is within"):
                call()
            said.append(call)
        assert generator.receiver.intact
        return generator.go_ahead(tensors)

    generator = Generator(store, directory, ahead=ahead)
    trainer.publish_weights()
    generator.receiver.prepare(1)
    assert len(said) == 3
    generator.receiver.apply(1)
    assert generator.did == ["ahead", "exchange"]


def test_an_iterator_that_is_kept_gives_nothing_later(store, directory, trainer):
    kept = []
    generator = Generator(store, directory, ahead=lambda tensors: kept.append(tensors))
    trainer.publish_weights()
    generator.receiver.prepare(1)
    assert list(kept[0]) == []
    generator.receiver.apply(1)
    assert list(kept[0]) == [] and generator.did == ["load"]


def test_an_iterator_that_another_thread_is_within_is_no_iterator_that_was_used(store, directory):
    """It is told so, and what comes after works."""
    within, over = threading.Event(), threading.Event()

    class Slow(InProcessByteStore):
        def get(self, ticket, timeout_s=None):
            if ticket == 1:
                within.set()
                assert over.wait(TIMEOUT_S)
            return super().get(ticket, timeout_s)

    def ahead(tensors):
        thread = threading.Thread(target=lambda: [*tensors])
        thread.start()
        threads.append(thread)
        assert within.wait(TIMEOUT_S)
        while not taken(tensors):
            time.sleep(0.001)
        return dict

    def taken(tensors):
        return tensors.gi_running

    threads, slow = [], Slow()
    publisher = WeightPublisher(slow, directory=directory, bucket_bytes=256, timeout_s=TIMEOUT_S)
    generator = Generator(slow, directory, ahead=ahead)
    publisher.publish(MODEL)
    with pytest.raises(ValueError, match="generator already executing"):
        generator.receiver.prepare(1)
    over.set()
    threads[0].join(TIMEOUT_S)
    assert generator.receiver.intact
    generator.receiver.pull()
    assert_same(generator.model.tensors, MODEL)


@pytest.mark.parametrize("end", ["gives up", "publishes no more"])
def test_a_publisher_that_ends_while_it_stands_still(store, directory, trainer, end):
    """What it fails for is told to who makes something ready when that goes on."""
    stood, over = threading.Event(), threading.Event()
    generator = Generator(store, directory)
    sync([trainer], [generator], directory, **PREPARED)

    def after(n):
        stood.set()
        assert over.wait(TIMEOUT_S)

    def before_each(name):
        if name == "mask":
            assert stood.wait(TIMEOUT_S)
            if end == "gives up":
                over.set()
                raise RuntimeError("the trainer died")
            trainer.publisher._keeping.give_up("its lease ended")
            over.set()
            raise RuntimeError("the trainer died")

    generator.after, trainer.before_each, trainer.seed = after, before_each, 1
    with pytest.raises(RuntimeError, match="the trainer died"):
        sync([trainer], [generator], directory, **PREPARED)
    await_no_fetching()
    assert generator.receiver.version == 1 and generator.receiver.intact
    trainer.before_each = generator.after = lambda _: None
    sync([trainer], [generator], directory, **PREPARED)
    assert_same(generator.model.tensors, weights(1))


def test_a_publisher_that_lags_is_waited_for_until_the_deadline(store, directory, trainer):
    over = threading.Event()
    trainer.before_each = lambda name: over.wait(TIMEOUT_S) if name == "mask" else None
    generator = Generator(store, directory)
    publishing = threading.Thread(target=trainer.publish_weights)
    publishing.start()
    with pytest.raises(BucketFetchError, match="its publisher lags"):
        generator.receiver.prepare(1, timeout_s=0.5)
    over.set()
    publishing.join(TIMEOUT_S)
    assert generator.receiver.intact and generator.given
    generator.receiver.prepare(1)
    generator.receiver.apply(1)
    assert_same(generator.model.tensors, weights())


def test_who_stands_still_past_the_deadline_has_all_that_came_before(store, directory, trainer):
    generator = Generator(store, directory)
    trainer.publish_weights()
    generator.after = lambda n: time.sleep(0.6) if not n else None
    generator.receiver.prepare(1, timeout_s=0.5)
    generator.receiver.apply(1)
    assert_same(generator.model.tensors, weights())
    assert generator.did == ["ahead", "exchange"]


def test_a_receiver_that_another_thread_closes_makes_the_version_ready_first(store, directory, trainer):
    def after(n):
        if not n:
            closing.start()

    generator = Generator(store, directory)
    closing = threading.Thread(target=generator.receiver.close)
    generator.after = after
    trainer.publish_weights()
    assert generator.receiver.prepare(1).version == 1
    closing.join(TIMEOUT_S)
    with pytest.raises(TransportClosedError):
        generator.receiver.apply(1)
    assert generator.did == ["ahead"]
