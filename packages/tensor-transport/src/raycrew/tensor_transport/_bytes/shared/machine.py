"""What this machine, or this process's share of it, has."""

from pathlib import Path


def memory_left() -> int:
    """Bytes that the machine, or this process's container, has left."""
    left = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            left = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return left
    return left if limit == "max" else min(left, int(limit) - used)
