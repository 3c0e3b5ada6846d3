"""Peers that are Ray actors, and the ends of actors."""

import os
import select
import time

import pytest

ray = pytest.importorskip("ray")

_DEADLINE_S = 240.0  # On a machine that is busy otherwise a process takes two minutes to start.


class Process:
    """A worker with a backend."""

    def __init__(self, backend):
        self.backend = backend

    def run(self, fn, *args):
        return fn(self.backend, *args)

    def pid(self):
        return os.getpid()


class Remade:
    """Arrives in another process as what `make()` makes there."""

    def __init__(self, make):
        self.make = make

    def __reduce__(self):
        return self.make, ()


class ActorPeer:
    """A process on a node; its start takes seconds, so what need not be killed is shared (`peers`)."""

    def __init__(self, backend, node="node1"):
        options = {"num_cpus": 0, "resources": {node: 1}}
        self.actor = ray.remote(Process).options(**options).remote(backend)
        self.process = os.pidfd_open(ray.get(self.actor.pid.remote(), timeout=_DEADLINE_S))

    def call(self, fn, *args):
        try:
            return ray.get(self.actor.run.remote(fn, *args), timeout=_DEADLINE_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def kill(self):
        ray.kill(self.actor)
        wait_for_end(lambda: self.actor.run.remote(repr))
        gone, _, _ = select.select([self.process], [], [], _DEADLINE_S)
        os.close(self.process)
        assert gone, "the process of a killed actor is still there"


def wait_for_end(call):
    """Until an actor that was killed answers no more: `ray.kill` returns before that."""
    deadline = time.monotonic() + _DEADLINE_S
    with pytest.raises(ray.exceptions.ActorDiedError):
        while time.monotonic() < deadline:
            ray.get(call(), timeout=_DEADLINE_S)
