"""Peers for what needs no Ray: a process each, with a backend or a transport, spoken to over a pipe."""

import functools
import multiprocessing
import traceback

_SPAWN = multiprocessing.get_context("spawn")


def serve(connection, make):
    made = make()
    while True:
        fn, args = connection.recv()
        try:
            connection.send((True, fn(made, *args)))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            error.add_note(traceback.format_exc())
            connection.send((False, error))


def itself(thing):
    return thing


class MakingPeer:
    """Has what `make()` makes there."""

    def __init__(self, make):
        self._connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, fn, *args):
        self._connection.send((fn, args))
        if not self._connection.poll(120):
            raise TimeoutError("the peer does not answer")
        good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def kill(self):
        self.process.kill()
        self.process.join(60)
        assert self.process.exitcode is not None


class ProcessPeer(MakingPeer):
    """Has a copy of a backend, as it arrives there."""

    def __init__(self, backend):
        super().__init__(functools.partial(itself, backend))
