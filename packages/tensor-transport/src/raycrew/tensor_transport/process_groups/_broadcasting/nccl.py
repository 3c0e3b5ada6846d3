"""A member's end over NCCL: tensors of one CUDA device, in order with what the caller's streams do."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from raycrew.tensor_transport._ray import PerProcess
from raycrew.tensor_transport.errors import TransportTimeoutError
from raycrew.tensor_transport.process_groups._process import Gate

log = logging.getLogger(__name__)

_DEADLINE_S = 7 * 24 * 3600.0
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_END_S = 5.0
_POLL_S = 0.0005
_environment_lock = PerProcess(threading.Lock)


class NcclFabric:
    """Tensors of one CUDA device over NCCL.

    All of it happens on a stream of its own. That waits for what the caller's stream had queued when the
    caller asked (`mark`); NCCL waits for that stream when a broadcast begins; and nobody hears that the bytes
    are there before all of it is done (`settle`).

    Whether a broadcast is done the device says, by an event behind it: torch's own word for it is also given
    for one that failed, and is no longer of use in Python.

    torch's watchdog ends the whole process when a collective fails or takes too long, and before that holds
    up for a minute whoever gives the group up, unless told otherwise while the group is made: deadlines and
    failures are this package's.

    Args:
        store: Where the members meet.
        rank: This one.
        size: How many there are.
        device: Whose tensors.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        import torch.distributed as dist

        self.device = device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_DEADLINE_S)  # noqa: SLF001
        with torch.cuda.device(device):
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._behind: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with _variables(_ENVIRONMENT):
                self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            self._group.eager_connect_single_device(device)

    def mark(self) -> Any:
        """An event after what the calling thread's current stream was given so far."""
        return torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def ordered(self, mark: Any) -> Iterator[None]:
        """Have the calling thread queue on this group's stream, after a mark."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> Any:  # noqa: ARG002
        """Begin a broadcast of bytes; what `wait` takes. Deadlines are kept by `end`.

        NCCL's own stream waits for the current one, which is that of `ordered`.
        """
        work = self._group.broadcast(tensor, root)
        with torch.cuda.stream(self._behind):
            work.wait()
            return self._behind.record_event()

    def wait(self, work: Any, timeout_s: float) -> bool:
        """Whether a broadcast is done within this time; what is queued after it finds its bytes.

        Raises:
            RuntimeError: NCCL has failed.
        """
        return _becomes(partial(self._is_done, work), timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Whether this group's stream is done within this time."""
        return _becomes(partial(self._is_done, self._stream.record_event()), timeout_s)

    def _is_done(self, event: Any) -> bool:
        """Whether the device has come to an event; it does not where NCCL has failed, so that is raised."""
        if event.query():
            return True
        if (error := self._group.get_error()).value:
            raise RuntimeError(f"NCCL failed: {error.name}")
        return False

    def end(self, works: Sequence[Any], held: Sequence[object] = ()) -> None:
        """Abort the communicator; kernels that wait for a peer end.

        What was queued behind something that stands still on the device is not waited for long: it is held.
        """
        group = self._group
        if group is None:
            return
        group.abort()
        gate = Gate("the end of a group over NCCL")
        try:
            gate.run(partial(_await_device, self.device, group, *works, *held), _END_S)
        except TransportTimeoutError:
            log.warning(
                "%s is not done: what a group over NCCL has under way is held until then", self.device
            )
        finally:
            gate.close()

    def close(self) -> None:
        """Give the communicator up."""
        if self._group is not None:
            self._group.abort()
        self._group = None


def _await_device(device: torch.device, *held: object) -> None:  # noqa: ARG001 - freed when it returns
    torch.cuda.synchronize(device)


def _becomes(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that hold while something is made."""
    with _environment_lock.here:
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
