"""Memory: read from the system as it is, joined with bundles, watched with a high-water mark."""

import logging
import threading
from types import SimpleNamespace

import psutil
import pytest

from raycrew.cluster_core import Bundle
from raycrew.cluster_core.memory import (
    BundleMemory,
    DeviceMemory,
    MemoryMonitor,
    NodeMemory,
    by_bundle,
    memory_usage,
    read_devices,
    read_host_memory,
    read_node_memory,
)
from raycrew.cluster_core.testing import FakeCluster

GIB = 1 << 30


class Nvml:
    """An NVML of two devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken=False):
        self.broken, self.open = broken, 0

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)


@pytest.mark.smoke
def test_devices_through_nvml():
    nvml = Nvml()
    assert read_devices(nvml) == (DeviceMemory(0, GIB, 80 * GIB), DeviceMemory(1, 2 * GIB, 80 * GIB))
    assert nvml.open == 0
    assert read_devices(Nvml(broken=True)) == ()


@pytest.mark.smoke
def test_the_host_as_the_system_tells_it(tmp_path):
    used, total = read_host_memory(tmp_path)
    assert total == psutil.virtual_memory().total and 0 < used < total


@pytest.mark.smoke
@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": 2 * GIB, "memory.current": GIB, "memory.stat": f"anon 5\ninactive_file {GIB // 4}\n"},
        {
            "memory/memory.limit_in_bytes": 2 * GIB,
            "memory/memory.usage_in_bytes": GIB,
            "memory/memory.stat": f"total_inactive_file {GIB // 4}\n",
        },
    ],
)
def test_the_host_within_a_container(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(content))
    assert read_host_memory(tmp_path) == (3 * GIB // 4, 2 * GIB)


@pytest.mark.smoke
def test_a_container_without_a_limit_has_the_host(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("17\n")
    assert read_host_memory(tmp_path)[1] == psutil.virtual_memory().total


@pytest.mark.smoke
def test_bundles_are_joined_with_their_nodes():
    bundles = [Bundle(0, 0, "a", "h", {}, 1), Bundle(1, 0, "a", "h", {}), Bundle(2, 1, "gone", "h", {}, 0)]
    node = NodeMemory(5, 9, (DeviceMemory(0, 1, 8), DeviceMemory(1, 2, 8)))
    assert by_bundle(bundles, {"a": node}) == [
        BundleMemory(0, "a", 5, 9, 1, 2, 8),
        BundleMemory(1, "a", 5, 9),
    ]


@pytest.mark.smoke
def test_usage_of_a_cluster():
    with FakeCluster([2, 1]) as cluster:
        usage = memory_usage(cluster)
    assert [one.bundle_index for one in usage] == [0, 1, 2]
    assert all(0 < one.host_used_bytes < one.host_total_bytes for one in usage)


class Scripted:
    """One bundle whose node says one thing after the other."""

    bundles = (Bundle(0, 0, "a", "h", {}, 0),)

    def __init__(self, *readings):
        self.readings = iter(readings)

    def run_on_each_node(self, fn):
        reading = next(self.readings, None)
        if isinstance(reading, Exception):
            raise reading
        yield "a", reading or NodeMemory(1, 10, (DeviceMemory(0, 1, 8),))


@pytest.mark.smoke
def test_the_monitor_keeps_the_most_and_survives_failures(caplog):
    cluster = Scripted(
        NodeMemory(7, 10, (DeviceMemory(0, 2, 8),)),
        RuntimeError("a node went away"),
        NodeMemory(3, 10, (DeviceMemory(0, 6, 8),)),
        NodeMemory(2, 10),
    )
    seen, enough = [], threading.Event()

    def note(reading):
        seen.append(reading[0].host_used_bytes)
        if len(seen) == 4:
            enough.set()

    with caplog.at_level(logging.CRITICAL), MemoryMonitor(cluster, 0.1, note) as monitor:
        assert enough.wait(60)
    monitor.close()
    assert seen[:4] == [7, 3, 2, 1]
    peak = monitor.high_water[0]
    assert (peak.host_used_bytes, peak.device_used_bytes, peak.device_total_bytes) == (7, 6, 8)
    after = len(seen)
    monitor.start()
    assert len(seen) == after, "a closed monitor was started again"


@pytest.mark.smoke
@pytest.mark.parametrize("interval", [0, -1, 0.01, float("nan")])
def test_bad_intervals(interval):
    with pytest.raises(ValueError, match="interval_s"):
        MemoryMonitor(FakeCluster(), interval)


@pytest.mark.gpu
def test_a_real_device_is_read():
    pytest.importorskip("pynvml")
    devices = read_node_memory().devices
    assert devices and all(0 < one.used_bytes <= one.total_bytes for one in devices)
