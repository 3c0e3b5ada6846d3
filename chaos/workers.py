"""The workers that are disturbed. They are imported by name in processes of their own."""

import os
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raycrew.worker_groups import current_worker

Load = npt.NDArray[np.uint8]
NAMES = ("scale", "bias")
SIZE = 1 << 16


def checksum(load: Load) -> int:
    """What an answer says of the load that came with its item."""
    return zlib.crc32(load.tobytes())


def signs_of(record: Path) -> Path:
    """Where workers that are awake say so."""
    return record.with_name("awake")


class Member:
    """Answers items, and serves weights.

    Args:
        record: File to which each item that may run once only is appended when it runs.
        start_s: How long `__init__` takes.
        linger_s: How long `linger` takes.
        item_s: How long each item takes.
        directory: Where weights are announced.
        shared: Folder of shared memory that they come through.
        group: What its group is called beside the record, where it says that it is awake.
    """

    def __init__(
        self,
        record: str,
        start_s: float = 0.0,
        linger_s: float = 0.0,
        item_s: float = 0.0,
        directory: Any = None,
        shared: str = "",
        group: str = "",
    ) -> None:
        self._record, self._linger_s, self._item_s = Path(record), linger_s, item_s
        self._directory, self._shared, self._group = directory, shared, group
        self._weights: dict[str, Any] = {}
        self._receiver: Any = None
        time.sleep(start_s)

    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def answer(self, item: str, load: Load) -> tuple[str, int]:
        """The item and what came with it; may run again."""
        current_worker().tick()
        time.sleep(self._item_s)
        return item, checksum(load)

    def once(self, item: str, load: Load) -> tuple[str, int]:
        """The same, but it may run once only."""
        with self._record.open("a") as file:
            file.write(f"{item}\n")
        time.sleep(self._item_s)
        return item, checksum(load)

    def linger(self) -> None:
        """Take a while to clean up."""
        time.sleep(self._linger_s)

    def host(self, item: str) -> tuple[str, int]:
        """Listen on the master port, as what meets there does."""
        port = current_worker().master_port
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
        return self.once(item, np.zeros(1, np.uint8))[0], port

    def master_port(self) -> int:
        """The port at which the group meets."""
        return current_worker().master_port

    def wake(self) -> None:
        """Be awake, as whoever asks can see."""
        sign = self._sign()
        sign.parent.mkdir(exist_ok=True)
        sign.touch()

    def sleep(self) -> None:
        """Be asleep, whether this process or one before it was awake."""
        self._sign().unlink(missing_ok=True)

    def awake(self, item: str) -> tuple[str, list[str]]:
        """The item, and which workers are awake; may run again."""
        return item, sorted(sign.name for sign in signs_of(self._record).glob("*"))

    def _sign(self) -> Path:
        return signs_of(self._record) / f"{self._group} {current_worker().rank}"

    def prepare_weights(self, version: int) -> Any:
        """Fetch weights."""
        return self._receiving().prepare(version)

    def apply_weights(self, version: int) -> Any:
        """Take them."""
        return self._receiving().apply(version)

    def serve(self) -> tuple[int, list[float]]:
        """The version that is served, and each value that a weight has anywhere; raises without weights."""
        served = self._receiving().require(1)
        return served, sorted({float(x) for name in NAMES for x in self._weights[name].unique()})

    def _receiving(self) -> Any:
        if self._receiver is None:  # torch takes long to import, and most workers get no weights
            from raycrew.tensor_transport import WeightReceiver
            from raycrew.tensor_transport.transports import SharedMemoryTransport

            memory = SharedMemoryTransport(directory=self._shared)
            name = f"member {current_worker().rank}"
            self._receiver = WeightReceiver(
                self._load, store=memory, directory=self._directory, name=name, rollback="shadow"
            )
        return self._receiver

    def _load(self, tensors: Any) -> None:
        self._weights |= {name: tensor.clone() for name, tensor in tensors}


class Trainer:
    """Publishes weights that have one value everywhere, another one in each version."""

    def __init__(self, directory: Any, shared: str) -> None:
        from raycrew.tensor_transport import WeightPublisher
        from raycrew.tensor_transport.transports import SharedMemoryTransport

        self._memory = SharedMemoryTransport(arena_bytes=4 * SIZE, directory=shared)
        self._publisher = WeightPublisher(self._memory, directory=directory, bucket_bytes=SIZE)
        self._value = 0.0

    def publish_weights(self) -> Any:
        """The next version."""
        import torch

        self._value += 1.0
        return self._publisher.publish({name: torch.full((SIZE,), self._value) for name in NAMES})

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
