"""What a process is, and what decides which transports it can use."""

import functools
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport.transports._choosing.reasons import WHY_NOT
from raycrew.tensor_transport.transports._interface import Owner

_PACKAGES = ("raycrew-tensor-transport", "torch", "ray", "nixl")
_SHM = Path("/dev/shm")
_EXITING = 4  # the kernel's PF_EXITING


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """What one member of a group knows of itself; picklable, and the same whoever looks at it.

    Attributes:
        owner: The process: machine, pid, start, node.
        host: Name of its host.
        uid: The user that it runs as.
        shm: The file system that `/dev/shm` is, "" where there is none: containers may have their own.
        shm_free_bytes: What that has left.
        cluster: The Ray cluster that it is connected to, "" without one.
        gpus: UUIDs of the CUDA devices that it sees, its own first.
        versions: Installed versions of what the two ends of a transport have to agree on.
        unavailable: Name of a transport -> why this process can't use it.
    """

    owner: Owner
    host: str
    uid: int
    shm: str = ""
    shm_free_bytes: int = 0
    cluster: str = ""
    gpus: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """The boot of its machine."""
        return self.owner.machine


def this_process() -> Owner:
    """This process, as its offers name it; a forked child is another one."""
    return _identity(os.getpid(), _ray.node_id_if_connected())


def start_of(pid: int) -> int | None:
    """When a process that lives was started, in clock ticks since the boot; None where there is none.

    One that is about to end has no memory any more, and is none.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # In a fifth of a text file's time.
    except FileNotFoundError:
        return None
    try:
        line = os.read(fd, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    fields = line[line.rindex(b")") + 2 :].split()
    ends = fields[0] in b"ZX" or int(fields[6]) & _EXITING
    return None if ends else int(fields[19])


def shared_memory_name() -> str:
    """The file system of `/dev/shm` as this machine numbers it; "" where there is none."""
    return f"{boot_id()}-{_SHM.stat().st_dev}" if _SHM.is_dir() else ""


@functools.cache
def boot_id() -> str:
    """The boot of this machine; its name where the system tells no more."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


def member_facts() -> MemberFacts:
    """The facts of this process: call it in each member, and hand all of them to `choose_transport`."""
    unavailable = {name: reason for name, why in WHY_NOT.items() if (reason := why())}
    return MemberFacts(
        owner=this_process(),
        host=socket.gethostname(),
        uid=os.geteuid(),
        shm=shared_memory_name(),
        shm_free_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0,
        cluster=_cluster(),
        gpus=_gpus(),
        versions=_versions(),
        unavailable=unavailable,
    )


@functools.lru_cache(2)
def _identity(pid: int, node_id: str) -> Owner:
    namespace = Path("/proc/self/ns/pid")
    return Owner(
        machine=boot_id(),
        pid_namespace=str(namespace.readlink()) if namespace.is_symlink() else "",
        pid=pid,
        started=start_of(pid) or 0,
        node_id=node_id,
    )


def _cluster() -> str:
    """The cluster by its address; one that only this machine reaches is told from those of others."""
    address = _ray.cluster_address_if_connected()
    return f"{address} of {boot_id()}" if address.startswith(("127.", "localhost", "[::1]")) else address


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    own = torch.cuda.current_device()
    order = [own, *(i for i in range(torch.cuda.device_count()) if i != own)]
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in order)


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
