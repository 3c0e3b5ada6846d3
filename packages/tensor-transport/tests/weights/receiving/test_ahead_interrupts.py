"""Interrupts and forks while something is made ready of weights: nobody waits for who is gone."""

import gc
import os
import signal
import threading

import pytest
import torch
from doubles import Generator, await_no_fetching, fetching
from models import assert_same, weights
from pressing import press_everywhere
from streaming import TIMEOUT_S

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightPublisher

pytestmark = pytest.mark.hostile
MODEL = {f"layers.{i}": torch.full((64,), float(i)) for i in range(6)}


def test_an_interrupt_of_the_thread_that_fetches_is_raised_where_it_is_hushed(store, directory):
    class Pressed(InProcessByteStore):
        def get(self, ticket, timeout_s=None):
            if self.reads == 2:
                raise KeyboardInterrupt
            return super().get(ticket, timeout_s)

    def ahead(tensors):
        try:
            list(tensors)
        except KeyboardInterrupt:
            return

    pressed = Pressed()
    pressed.held = store.held
    WeightPublisher(store, directory=directory, bucket_bytes=256).publish(iter(MODEL.items()))
    with pytest.raises(KeyboardInterrupt):
        Generator(pressed, directory, ahead=ahead).receiver.prepare(1)


def test_ctrl_c_while_a_bucket_is_waited_for(store, directory, trainer):
    """The publisher lags, and goes on without this receiver."""
    over, generator = threading.Event(), Generator(store, directory)

    def before_each(name):
        if name == "mask":
            os.kill(os.getpid(), signal.SIGINT)
            assert over.wait(TIMEOUT_S)

    trainer.before_each = before_each
    publishing = threading.Thread(target=trainer.publish_weights)
    with pytest.raises(KeyboardInterrupt):
        publishing.start()
        generator.receiver.prepare(1)
    over.set()
    publishing.join(TIMEOUT_S)
    assert generator.receiver.intact
    generator.receiver.prepare(1)
    generator.receiver.apply(1)
    assert_same(generator.model.tensors, weights())


def test_an_interrupt_at_any_moment_keeps_no_publisher_waiting(store, directory):
    publisher = WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=TIMEOUT_S)
    generator = Generator(store, directory)
    small = dict(list(MODEL.items())[:3])
    publisher.publish(small)
    places = ("/weights/_receiving/", "/_directory/directory.py")

    def prepare():
        generator.receiver.prepare(directory.latest)

    for nth in press_everywhere(prepare, places):
        if fetching():
            gc.collect()  # One that could not be told to end ends with what it fetched for.
        await_no_fetching()
        assert generator.receiver.intact
        assert publisher.publish(small).version == nth + 1
    assert nth > 50
    generator.receiver.apply(directory.latest)
    assert_same(generator.model.tensors, small)


def test_a_process_that_is_forked_by_it_and_ends_there_gives_nothing_up(store, directory, trainer):
    def after(n):
        if n == 2 and (child := os.fork()) == 0:
            raise SystemExit(7)
        if n == 2:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    generator, parent = Generator(store, directory), os.getpid()
    generator.after = after
    trainer.publish_weights()
    try:
        generator.receiver.prepare(1)
    finally:
        if os.getpid() != parent:
            os._exit(7)
    generator.receiver.apply(1)
    assert generator.did == ["ahead", "exchange"]
    assert_same(generator.model.tensors, weights())
