"""Peers for backends that need no Ray: a process per peer, spoken to over a pipe."""

import multiprocessing
import traceback

_SPAWN = multiprocessing.get_context("spawn")


def serve(connection, backend):
    while True:
        fn, args = connection.recv()
        try:
            connection.send((True, fn(backend, *args)))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            error.add_note(traceback.format_exc())
            connection.send((False, error))


class ProcessPeer:
    def __init__(self, backend):
        self._connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=serve, args=(theirs, backend), daemon=True)
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
