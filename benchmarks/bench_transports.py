"""Pulls on one node, from another process into a buffer that is there, against one copy in memory."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from harness import Figure, ratio, seconds
from raycrew.tensor_transport.transports import (
    Offer,
    ProcessVmTransport,
    PullTransport,
    SharedMemoryTransport,
    TcpTransport,
)

MIB = 1 << 20
MAKERS: dict[str, Callable[[], PullTransport]] = {
    "shared_memory": lambda: SharedMemoryTransport(arena_bytes=128 * MIB),
    "process_vm": ProcessVmTransport,
    "tcp": TcpTransport,
}
GOALS = {("shared_memory", False): 0.85, ("process_vm", False): 0.85}
GOALS |= {("shared_memory", True): 0.5, ("process_vm", True): 0.5}


def owner(name: str, size: int, answers: Connection) -> None:
    """Offers bytes until it is told to end."""
    torch.set_num_threads(1)
    with MAKERS[name]() as transport:
        source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        answers.send([transport.offer(source, folded=folded) for folded in (False, True)])
        answers.recv()


def pulls(name: str, size: int, repeat: int) -> list[Figure]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=owner, args=(name, size, there))
    process.start()
    with MAKERS[name]() as transport:
        if (reason := transport.available()) is not None:
            raise RuntimeError(reason)
        figures = [_against_copy(name, transport, offer, repeat) for offer in here.recv()]
    here.send(None)
    process.join()
    return figures


def _against_copy(name: str, transport: Any, offer: Offer, repeat: int) -> Figure:
    folded = offer.fold is not None
    into, source, target = (np.ones(offer.size_bytes, np.uint8) for _ in range(3))
    return ratio(
        f"pull {offer.size_bytes // MIB} MiB by {name}{', folded' * folded}: speed over a copy",
        lambda: seconds(lambda: transport.pull([offer.whole], [into]).wait(60)),
        lambda: seconds(lambda: np.copyto(target, source)),
        baseline="numpy copy of the same bytes in one process",
        goal=GOALS.get((name, folded)),
        better="higher",
        repeat=repeat,
        warmup=2,
        invert=True,
    )


def run(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    return [figure for name in MAKERS for figure in pulls(name, 64 * MIB, 5 if quick else 31)]
