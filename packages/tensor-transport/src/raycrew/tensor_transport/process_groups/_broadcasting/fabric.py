"""What moves the bytes of a group: gloo or NCCL, made directly, and never torch's default group."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch

from raycrew.tensor_transport.process_groups._membership import Seat
from raycrew.tensor_transport.process_groups._process import Endpoint, cut

log = logging.getLogger(__name__)

STALL_S = 30.0
"""A piece that does not get through for so long stands still."""

_SETTLE_S = 0.2
_THREADS = 4
_NCCL_DEADLINE_S = 7 * 24 * 3600.0
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NCCL_POLL_S = 0.0005
_environment_lock = threading.Lock()


class Fabric(Protocol):
    """One member's end of a process group."""

    device: torch.device

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> Any:
        """Begin a broadcast of bytes; the work to wait for."""
        ...

    def wait(self, work: Any, timeout_s: float) -> bool:
        """Whether a work ended within this time; raises what it failed with."""
        ...

    def end(self, works: Sequence[Any]) -> None:
        """Have everything that is under way fail, here and with the others; nothing is written afterwards."""
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

    def end(self, works: Sequence[Any]) -> None:
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


class NcclFabric:
    """Tensors of the current CUDA device over NCCL.

    torch's watchdog ends the whole process when a collective fails or takes too long, unless told otherwise
    while the group is made: deadlines and failures are this package's.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_NCCL_DEADLINE_S)  # noqa: SLF001
        with _variables(_NCCL_ENVIRONMENT):
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(self.device)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> Any:  # noqa: ARG002
        """Begin a broadcast of bytes; the work to wait for. Deadlines are kept by `cut`."""
        return self._group.broadcast(tensor, root)

    def wait(self, work: Any, timeout_s: float) -> bool:
        """Whether a work ended within this time; raises what it failed with."""
        end = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(_NCCL_POLL_S)
        if (error := work.exception()) is not None:
            raise RuntimeError(str(error))
        work.wait()
        return True

    def end(self, works: Sequence[Any]) -> None:  # noqa: ARG002
        """Abort the communicator; kernels that wait for a peer end."""
        if self._group is not None:
            self._group.abort()
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give the communicator up."""
        if self._group is not None:
            self._group.abort()
        self._group = None


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


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that hold while something is made."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def fabric_for(backend: str, store: Any, rank: int, seats: Sequence[Seat], timeout_s: float) -> Fabric:
    """The end of a member; returns when all members are connected."""
    if backend == "nccl":
        return NcclFabric(store, rank, len(seats))
    return GlooFabric(store, rank, [seat.lifeline[0] for seat in seats], timeout_s)
