"""A generator that makes something ready of a version while it comes, and then only exchanges it."""

import threading
from functools import partial

import streaming
import torch

from raycrew.tensor_transport.testing._transports import bits_of
from raycrew.tensor_transport.weights import WeightReceiver


class Generator(streaming.Generator):
    """Copies tensors into a second model as they come, and takes that for its own.

    Attributes:
        did: "ahead", "exchange" and "load", in order.
        given: What `ahead` was given last.
        after: Called by `ahead` with the number of the tensor that it has just copied.
        exchange: What is called in place of `load`.
    """

    def __init__(self, store, directory, **options):
        self.did, self.given, self.after = [], {}, lambda n: None
        self.exchange = self.exchanged
        super().__init__(store, directory, **{"ahead": self.go_ahead} | options)

    def go_ahead(self, tensors):
        self.did.append("ahead")
        self.given = given = {}
        for n, (name, tensor) in enumerate(tensors):
            given[name] = tensor.clone()
            self.after(n)
        return partial(self.exchange, given)

    def exchanged(self, given, tensors):
        self.did.append("exchange")
        for name, tensor in tensors:
            assert same_bits(tensor, given[name]), name
        self.model.tensors = self.model.tensors | given

    def load(self, tensors):
        self.did.append("load")
        super().load(tensors)


def same_bits(one, other):
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(bits_of(one), bits_of(other))


def readies(load, ahead, store, directory, **options):
    """A receiver of both."""
    return WeightReceiver(load, ahead=ahead, store=store, directory=directory, **options)


def fetching():
    """Threads that fetch buckets."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("weight-fetch")]


def await_no_fetching(timeout_s=60.0):
    for thread in fetching():
        thread.join(timeout_s)
        assert not thread.is_alive()
