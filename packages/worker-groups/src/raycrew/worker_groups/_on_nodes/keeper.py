"""What is left of a node's watch when it is killed: a process without Ray, which ends what workers leave.

A driver that is killed takes its actors along, workers and watches alike, but not what workers have started
in sessions of their own. The watch tells its keeper what it knows; once the watch is gone, the keeper waits
until each worker is gone too (a killed watch alone is no reason to end anything), ends the rest, and itself.
Meanwhile it keeps the workers' limits of memory: nobody may ask for another watch for long.

Standard library only: a node's watch is sent this module by value, and hands its text to the keeper.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from raycrew.worker_groups._on_nodes.limits import MemoryLimits
from raycrew.worker_groups._on_nodes.lookout import Lookout
from raycrew.worker_groups._on_nodes.process_table import Process, kill, runs

_START_S = 30.0
_LOOK_S = 1.0  # between two looks at the table, and at most one part in ten of the time is spent on them
_ORPHANS_S = 1.0  # for what a worker leaves behind to end by itself, as Python's resource tracker does
_GIVE_UP_S = 60.0
_MOST_BYTES = 1 << 20
_MOST_MEMBERS = 5000  # more do not fit into a message; the others are found anew by their parents and marks

# The first process ends at once, so that nobody ends the second one with the watch's children.
_PROGRAM = """
import json, os, socket, sys, types
if os.fork():
    os._exit(0)
channel = socket.socket(fileno=os.dup(0))
for name, text in json.loads(channel.recv(1 << 20)).items():
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.serve(channel)
"""


class Keeper:
    """A watch's side of its keeper.

    Args:
        sources: Texts of the modules that the keeper runs, by name; this one is the last.

    Raises:
        OSError: It can't be started.
        SubprocessError: It does not start.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._told: dict[Process, tuple[set[Process], int]] = {}
        with theirs:
            started = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, f"raycrew-keeper-of-{os.getpid()}"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        started.wait(_START_S)
        self._channel.send(json.dumps(dict(sources)).encode())
        self._channel.setblocking(False)

    def tell(self, lookout: Lookout, limits: MemoryLimits) -> bool:
        """Tell what is new; False where some can't be told now, which is told the next time."""
        told = True
        known = {
            root: (family.mark, family.members, limits.of(root)) for root, family in lookout.families.items()
        }
        gone: dict[Process, tuple[str, set[Process], int]] = {
            root: ("", set(), 0) for root in {*self._told} - {*known}
        }
        for root, (mark, members, limit_bytes) in {**known, **gone}.items():
            if self._told.get(root) == (members, limit_bytes):
                continue
            message = json.dumps([root, mark, sorted(members)[:_MOST_MEMBERS], limit_bytes]).encode()
            try:
                self._channel.send(message)
                self._told[root] = set(members), limit_bytes
            except OSError:  # it is stopped, or busy, or somebody killed it
                told = False
            if root in gone:
                self._told.pop(root)
        return told

    def close(self) -> None:
        """Let go of the keeper, as the end of this process does."""
        self._channel.close()


def serve(channel: socket.socket) -> None:
    """Be the keeper: listen until the watch is gone, end what is left, and return."""
    lookout, limits = Lookout(), MemoryLimits()
    while message := channel.recv(_MOST_BYTES):
        _take_in(lookout, limits, message)
    channel.close()
    gone_at: dict[Process, float] = {}
    while lookout.families:
        began = time.monotonic()
        limits.enforce()
        with contextlib.suppress(OSError):  # the table can't be read now; it is tried again
            lookout.look()
            for root in [root for root in lookout.families if not runs(root)]:
                _end_rest(lookout, root, began - gone_at.setdefault(root, began))
        spent = time.monotonic() - began
        time.sleep(max(0.1, 2 * spent) if gone_at else max(_LOOK_S, 10 * spent))


def _take_in(lookout: Lookout, limits: MemoryLimits, message: bytes) -> None:
    root, mark, members, limit_bytes = json.loads(message)
    if not members:
        lookout.families.pop(Process(*root), None)
        return
    family = lookout.family(Process(*root), mark)
    family.members = {Process(*member) for member in members}
    limits.set(family.root, limit_bytes)


def _end_rest(lookout: Lookout, root: Process, gone_s: float) -> None:
    members = lookout.families[root].members
    if not members or gone_s > _GIVE_UP_S:
        del lookout.families[root]
    elif gone_s >= _ORPHANS_S:
        for member in members:
            kill(member)
