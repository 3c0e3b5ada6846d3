"""What happens where a disk or the shared memory is full, in a process that alone sees it mounted."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

_MOUNT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'
_ALONE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT)


class SkippedError(Exception):
    """A fault can't be injected here, and why."""


def tried(kind: str, folder: Path, timeout_s: float) -> str:
    """What became of a fault: "as promised", or what was not.

    Raises:
        SkippedError: Nothing can be mounted here.
    """
    where = Path("/dev/shm") if kind == "full shared memory" else folder / "disk"
    where.mkdir(exist_ok=True)
    alone = (*_ALONE, "4m" if kind == "full shared memory" else "2m", str(where))
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=timeout_s)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SkippedError(f"nothing can be mounted here: {error}") from error
    command = [*alone, sys.executable, "-m", "chaos.mounts", kind, str(where), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    words = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return words[-1] if words else f"ended with {done.returncode}"


def full_shared_memory(where: Path) -> str:
    """Putting fails with an error of the transport's, what was put before is whole; there is room later."""
    import torch

    from raycrew.tensor_transport import RTensor, ShardRegistry, TransportError
    from raycrew.tensor_transport.backends.shared_memory import SharedMemoryBackend

    backend = SharedMemoryBackend(arena_bytes=1 << 20, directory=where)
    shards: list[torch.Tensor] = []
    kept = []
    try:
        for number in range(64):
            kept += backend.put([torch.full((1 << 18,), number, dtype=torch.uint8)])
    except TransportError:
        pass
    else:
        return "64 puts had room, where there is none"
    registry = ShardRegistry(backend)
    for number, shard in enumerate(kept):
        (tensor,) = registry.fetch([RTensor(shard)], timeout_s=10)
        if not bool((tensor == number).all()):
            return f"shard {number} has other bytes"
        shards.append(tensor)
    del tensor
    shards.clear()
    backend.release(kept)
    backend.release(backend.put([torch.zeros(1 << 18, dtype=torch.uint8)]))
    backend.close()
    left = [path.name for path in where.rglob("raycrew-*") if path.is_file()]
    return f"left: {left}" if left else "as promised"


def full_disk(where: Path, folder: Path) -> str:
    """A build fails with `DiskFullError`, publishes nothing, locks nothing, and works where there is room."""
    from raycrew.venv_manager import DiskFullError, EnvironmentSpec, Store, ensure
    from raycrew.venv_manager.testing import FakeUv

    uv = FakeUv(folder / "fake-uv", files=64)
    spec = EnvironmentSpec.requirements(["fake"], carry=False)
    environ = {**os.environ, **uv.environ}
    full, roomy = Store(where, environ=environ), Store(folder / "roomy", environ=environ)
    filler = where / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(4 << 20))
    try:
        ensure(spec, store=full)
    except DiskFullError:
        pass
    else:
        return "a build had room, where there is none"
    if full.environments():
        return f"published: {full.environments()}"
    filler.unlink()
    for store in (full, roomy):
        if not ensure(spec, store=store).python.exists():
            return f"no environment in {store.root}, where there is room"
    return "as promised"


if __name__ == "__main__":
    what, mounted, beside = sys.argv[1:]
    found = full_shared_memory(Path(mounted)) if "memory" in what else full_disk(Path(mounted), Path(beside))
    sys.stdout.write(f"{found}\n")
