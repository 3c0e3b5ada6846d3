"""Processes with a transport of their own, spoken to over a pipe or as actors."""

import multiprocessing
import traceback

_SPAWN = multiprocessing.get_context("spawn")


def serve(connection, make):
    transport = make()
    while True:
        fn, args = connection.recv()
        try:
            connection.send((True, fn(transport, *args)))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            error.add_note(traceback.format_exc())
            connection.send((False, error))


class TransportProcess:
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


class Remade:
    """Arrives in another process as what `make()` makes there."""

    def __init__(self, make):
        self.make = make

    def __reduce__(self):
        return self.make, ()
