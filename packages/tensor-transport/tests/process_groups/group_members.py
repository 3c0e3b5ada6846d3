"""Processes that join groups, called over a pipe."""

import multiprocessing
import traceback

import torch

from raycrew.tensor_transport.process_groups import GroupHost, join_group
from raycrew.tensor_transport.testing import take_device

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["torch", "raycrew.tensor_transport.testing"])  # Imported once for all.


def serve(connection):
    torch.set_num_threads(1)
    held = []
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, _join(held, *args) if fn == "join" else fn(held[-1], *args)))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            error.add_note(traceback.format_exc())
            connection.send((False, error))


def _join(held, invitation, timeout_s):
    while held:
        held.pop().close()
    if invitation.backend == "nccl":
        take_device(invitation.rank, len(invitation.members), torch.cuda.device_count())
    held.append(join_group(invitation, timeout_s=timeout_s))
    return held[-1].explain()


class Member:
    """A process; one call at a time."""

    def __init__(self):
        self._connection, theirs = _FORKSERVER.Pipe()
        self.process = _FORKSERVER.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        self.pid = self.process.pid
        theirs.close()

    def begin(self, fn, *args):
        self._connection.send((fn, args))

    def result(self, timeout_s=120):
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} hangs")
        good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def call(self, fn, *args):
        self.begin(fn, *args)
        return self.result()

    def end(self):
        self.process.kill()
        self.process.join(60)


class Crew:
    """Members that are there for the next group as well; those that died are replaced."""

    def __init__(self, names=("trainer/0", "generator/0", "generator/1"), backend="gloo"):
        self.backend = backend
        self.host = GroupHost("weights", names, backend=backend, address="127.0.0.1")
        self.members = []

    def replace_dead(self):
        alive = [member for member in self.members if member.process.is_alive()]
        for member in self.members:
            if member not in alive:
                member.end()
        missing = len(self.host.members) - len(alive)
        self.members = alive + [Member() for _ in range(missing)]
        return self.members

    def join(self, invitations=None, timeout_s=60):
        """Have all join the next generation; the members in rank order."""
        members = self.replace_dead()
        for member, invitation in zip(members, invitations or self.host.open(), strict=True):
            member.begin("join", invitation, timeout_s)
        for member in members:
            member.result()
        return members

    def end(self):
        """The next group is of other members."""
        while self.members:
            self.members.pop().end()

    def close(self):
        self.end()
        self.host.close()
