"""One GPU in place of several, so that collectives over NCCL can be tried on a machine with fewer devices."""

import os
import sys
from typing import Any

import torch

from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.transports import member_facts


def take_device(rank: int, ranks: int, devices: int) -> torch.device:
    """Make a device the current one of this process, which does nothing else: that of a rank.

    Where there are fewer devices than ranks, several ranks have the same one. NCCL refuses that within a
    host, and so does `choose_transport`: each process passes for a host of its own then, with a device of its
    own, and its bytes go over sockets.

    Args:
        rank: This one.
        ranks: How many there are.
        devices: How many devices the machine has for all of them.

    Returns:
        The device.

    Raises:
        TransportError: This process sees no GPU.
    """
    if not torch.cuda.is_available():
        raise TransportError("this process sees no GPU: there is none to take")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if ranks > devices:
        os.environ |= {"NCCL_HOSTID": f"host of rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        seen = f"{torch.cuda.get_device_properties(device).uuid} as that of rank {rank}"
        where_facts_are: Any = sys.modules[member_facts.__module__]
        where_facts_are._gpus = lambda: (seen,)  # noqa: SLF001 - what this process says of its devices
    return device
