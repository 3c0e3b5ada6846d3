"""Memory of a cluster's bundles: read once, or watched with a high-water mark."""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self, TypeVar

import psutil

from raycrew.cluster_core._planning import Bundle
from raycrew.cluster_core.errors import ClusterClosedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_SHORTEST_S = 0.1


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, whoever uses it.

    Attributes:
        index: Physical index on its node.
        used_bytes: What is in use.
        total_bytes: All that it has.
    """

    index: int
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of one node, as far as this process's container may use it.

    Attributes:
        used_bytes: Host memory in use, without what the system could free at once.
        total_bytes: Host memory there is.
        devices: Its devices; empty without NVML.
    """

    used_bytes: int
    total_bytes: int
    devices: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class BundleMemory:
    """Memory that a bundle's workers live in: its device, and the host memory that its node's bundles share.

    Attributes:
        bundle_index: Index of the bundle.
        node_id: Ray id of its node.
        host_used_bytes: Host memory in use on the node, by anybody.
        host_total_bytes: Host memory of the node.
        device_index: Its device, or None where that is not known.
        device_used_bytes: Device memory in use, by anybody; None where it can't be told.
        device_total_bytes: Memory of the device; None where it can't be told.
    """

    bundle_index: int
    node_id: str
    host_used_bytes: int
    host_total_bytes: int
    device_index: int | None = None
    device_used_bytes: int | None = None
    device_total_bytes: int | None = None


class _Watchable(Protocol):
    @property
    def bundles(self) -> Sequence[Bundle]: ...

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]: ...


def memory_usage(cluster: _Watchable) -> list[BundleMemory]:
    """Read the memory of every bundle, in bundle order; bundles of nodes that don't answer are left out.

    Args:
        cluster: A `RayVirtualCluster`, or anything with `bundles` and `run_on_each_node`.
    """
    bundles = list(cluster.bundles)
    return by_bundle(bundles, dict(cluster.run_on_each_node(read_node_memory)))


def by_bundle(bundles: Sequence[Bundle], nodes: Mapping[str, NodeMemory]) -> list[BundleMemory]:
    """Join bundles with what their nodes said."""
    found = []
    for bundle in bundles:
        node = nodes.get(bundle.node_id)
        if node is None:
            continue
        device = next((one for one in node.devices if one.index == bundle.device_index), None)
        found.append(
            BundleMemory(
                bundle.index,
                bundle.node_id,
                node.used_bytes,
                node.total_bytes,
                bundle.device_index,
                device.used_bytes if device else None,
                device.total_bytes if device else None,
            )
        )
    return found


def read_node_memory() -> NodeMemory:
    """Read the memory of this node."""
    used, total = read_host_memory()
    return NodeMemory(used, total, read_devices())


def read_host_memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Used and total host memory in bytes, within the limit of this process's container."""
    host = psutil.virtual_memory()
    limit = _number(cgroup / "memory.max") or _number(cgroup / "memory" / "memory.limit_in_bytes")
    used = _number(cgroup / "memory.current") or _number(cgroup / "memory" / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= host.total:
        return host.total - host.available, host.total
    return max(used - _reclaimable(cgroup), 0), limit


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(cgroup: Path) -> int:
    for file in (cgroup / "memory.stat", cgroup / "memory" / "memory.stat"):
        try:
            lines = dict(line.split() for line in file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(lines.get("inactive_file", lines.get("total_inactive_file", 0)))
    return 0


def read_devices(nvml: ModuleType | Any | None = None) -> tuple[DeviceMemory, ...]:
    """Memory of this node's devices through NVML (extra `nvml`); nothing where it is missing."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.debug("NVML is installed and does not start: %s", error)
        return ()
    try:
        return tuple(_read_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _read_device(nvml: Any, index: int) -> DeviceMemory:
    info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
    return DeviceMemory(index, int(info.used), int(info.total))


class MemoryMonitor:
    """Reads the memory of a cluster's bundles again and again. A context manager.

    Args:
        cluster: What to watch.
        interval_s: Seconds from the end of one reading to the start of the next.
        callback: Called with each reading, on the monitor's thread.

    Raises:
        ValueError: `interval_s` is below 0.1.
    """

    def __init__(
        self,
        cluster: _Watchable,
        interval_s: float = 10.0,
        callback: Callable[[list[BundleMemory]], object] | None = None,
    ) -> None:
        if not interval_s >= _SHORTEST_S:
            raise ValueError(f"interval_s {interval_s!r} is below {_SHORTEST_S}")
        self._cluster, self._interval_s, self._callback = cluster, interval_s, callback
        self._peak: dict[int, BundleMemory] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def high_water(self) -> dict[int, BundleMemory]:
        """The most that was seen in use, by bundle index; host and device apart."""
        with self._lock:
            return dict(self._peak)

    def start(self) -> Self:
        """Begin to watch; a second call does nothing."""
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._watch, name="raycrew-memory", daemon=True)
            self._thread.start()
        return self

    def read(self) -> list[BundleMemory]:
        """Read once, now, and count it in the high-water mark."""
        reading = memory_usage(self._cluster)
        with self._lock:
            for one in reading:
                self._peak[one.bundle_index] = _most(self._peak.get(one.bundle_index), one)
        return reading

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop watching; idempotent. The high-water mark stays readable."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                reading = self.read()
                if self._callback is not None:
                    self._callback(reading)
            except (ClusterClosedError, ReferenceError):
                return  # The cluster is over, and with it what there was to watch.
            except Exception:
                if not self._stop.is_set():
                    logger.exception("reading the memory failed; the next try is in %g s", self._interval_s)
            self._stop.wait(self._interval_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _most(before: BundleMemory | None, now: BundleMemory) -> BundleMemory:
    if before is None:
        return now
    devices = [used for used in (before.device_used_bytes, now.device_used_bytes) if used is not None]
    return replace(
        now,
        host_used_bytes=max(before.host_used_bytes, now.host_used_bytes),
        device_used_bytes=max(devices, default=None),
    )
