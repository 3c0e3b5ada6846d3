"""What moves the bytes of a group: gloo or NCCL, made directly, and never torch's default group."""

import logging
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch

from raycrew.tensor_transport.process_groups._broadcasting.nccl import NcclFabric
from raycrew.tensor_transport.process_groups._membership import Seat
from raycrew.tensor_transport.process_groups._process import Endpoint, cut

log = logging.getLogger(__name__)

STALL_S = 30.0
"""A piece that does not get through for so long stands still."""

_SETTLE_S = 0.2
_THREADS = 4


class Fabric(Protocol):
    """One member's end of a process group."""

    device: torch.device

    def mark(self) -> Any:
        """What the calling thread has queued on the device so far, which operations come after."""
        ...

    def ordered(self, mark: Any) -> AbstractContextManager[object]:
        """What is queued in here comes after a mark, and one after another."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> Any:
        """Begin a broadcast of bytes; the work to wait for."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Whether what was queued in `ordered` is done within this time: the bytes are where they belong."""
        ...

    def wait(self, work: Any, timeout_s: float) -> bool:
        """Whether a work ended within this time; raises what it failed with."""
        ...

    def end(self, works: Sequence[Any], held: Sequence[object] = ()) -> None:
        """Have everything that is under way fail, here and with the others; nothing is written afterwards.

        Where a device stands still, that is not waited for: what is `held` is not freed before it goes on.
        """
        ...

    def close(self) -> None:
        """Give everything up."""
        ...


class GlooFabric:
    """Tensors of the CPU over TCP.

    gloo can't abort. It sees that a connection ends, and fails what waits to receive; what was about to send
    goes on waiting until a timeout of its own. So that is short, and whoever waits for the end is a thread.
    """

    def __init__(self, store: Any, rank: int, addresses: Sequence[str], timeout_s: float) -> None:
        import torch.distributed as dist

        # torch has no public name for the options that say which address to listen at.
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options._threads = _THREADS  # noqa: SLF001
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=addresses[rank])]  # noqa: SLF001
        self.device = torch.device("cpu")
        self._group: Any = dist.ProcessGroupGloo(store, rank, len(addresses), options)
        self._endpoints = _endpoints(store, addresses)
        self._rank = rank
        self._overdue: list[Any] = []

    def mark(self) -> None:
        """Nothing: what is done to memory of the CPU is done at once."""

    def ordered(self, mark: Any) -> AbstractContextManager[object]:  # noqa: ARG002
        """As it is in any case."""
        return nullcontext()

    def settle(self, timeout_s: float) -> bool:  # noqa: ARG002
        """It has, when the broadcasts have ended."""
        return True

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> Any:
        """Begin a broadcast of bytes; the work to wait for."""
        return self._group.broadcast(tensor, root, timedelta(seconds=min(timeout_s, STALL_S)))

    def wait(self, work: Any, timeout_s: float) -> bool:
        """Whether a work ended within this time; raises what it failed with."""
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # What it failed with; or it succeeded at the very moment.
        return True

    def end(self, works: Sequence[Any], held: Sequence[object] = ()) -> None:  # noqa: ARG002
        """Shut the connections down; then only what was about to send is still under way."""
        if self._endpoints:
            own, *others = self._endpoints[self._rank :] + self._endpoints[: self._rank]
            cut(own, others)
        patience_s = _SETTLE_S if self._endpoints else 2 * STALL_S
        self._overdue += [work for work in works if not _settles(self, work, patience_s)]

    def close(self) -> None:
        """Give the connections and threads up, as soon as nothing is under way any more.

        Its destructor would wait for that with all threads of Python standing still.
        """
        group, overdue, self._group, self._overdue = self._group, self._overdue, None, []
        if overdue:
            log.info("gloo ends a send that was cut off; that takes up to %g s", STALL_S)
            name = "end of a gloo group"
            threading.Thread(target=_bury, args=(self, group, overdue), name=name, daemon=True).start()


def _settles(fabric: Fabric, work: Any, timeout_s: float) -> bool:
    """Whether a work that nobody wants any more ends, well or not, within this time."""
    try:
        return fabric.wait(work, timeout_s)
    except RuntimeError:
        return True  # It failed, as it should.


def _bury(fabric: Fabric, group: object, works: list[Any]) -> None:
    """Hold a group until its works have ended, and only then let it go."""
    while works:
        if _settles(fabric, works[-1], 1.0):
            works.pop()
    del group


def _endpoints(store: Any, addresses: Sequence[str]) -> list[Endpoint]:
    """Where each member's gloo listens, found in what gloo tells the others; empty where it can't be found.

    Without them nothing is cut, and what is under way ends with its own timeout.
    """
    keys = [f"0/{rank}" for rank in range(len(addresses))]
    if len(addresses) == 1 or not store.check(keys):
        return []
    ports = [_port(store.get(key), address) for key, address in zip(keys, addresses, strict=True)]
    if not all(ports):
        log.warning("the addresses of gloo are not where they were: its operations end by timeouts alone")
        return []
    return list(zip(addresses, ports, strict=True))


def _port(blob: bytes, address: str) -> int:
    """The port of the `sockaddr` with an address, in what a member's gloo tells of itself; 0 without one."""
    for family, gap in ((socket.AF_INET, 0), (socket.AF_INET6, 4)):
        try:
            packed = socket.inet_pton(family, address)
        except OSError:
            continue
        at = blob.find(packed) - gap
        if at >= 4 and blob[at - 4 : at - 2] == struct.pack("=H", family):
            return int.from_bytes(blob[at - 2 : at])
    return 0


def device_for(backend: str) -> torch.device:
    """What a group moves bytes of, asked for by the thread that joins it: each thread has its own device."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def fabric_for(
    backend: str, store: Any, rank: int, seats: Sequence[Seat], timeout_s: float, device: torch.device
) -> Fabric:
    """The end of a member; returns when all members are connected."""
    if backend == "nccl":
        return NcclFabric(store, rank, len(seats), device)
    return GlooFabric(store, rank, [seat.lifeline[0] for seat in seats], timeout_s)
