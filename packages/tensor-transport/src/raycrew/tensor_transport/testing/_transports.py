"""What the checks of all transports share: tensors of every kind, and a look at what is left behind."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from raycrew.tensor_transport._bytes import TORCH_DTYPES, is_free

OVERSIZED_BYTES = 70 << 20
TINY = 2000
_SETTLE_S = 5.0
"""So long connections may take to end before another round is tried."""


class TransportCase(Protocol):
    """A transport under test, and the promises that it is held to."""

    def checks(self) -> Sequence[Callable[[], None]]:
        """Each of them raises AssertionError unless a promise is kept."""
        ...


def check_transport(case: TransportCase) -> None:
    """Raise AssertionError unless a transport keeps every promise of its interface.

    Every dtype and layout, thousands of tiny tensors and an oversized one, order, concurrent use, deadlines,
    cancellation, peers that are stopped or killed, damaged and wrongly described bytes, closing in the midst,
    bounded memory, and nothing left behind. `PullCase` and `BroadcastCase` are such cases.
    """
    for check in case.checks():
        check()


def samples() -> dict[str, torch.Tensor]:
    """Tensors of every dtype and layout that has plain bytes, the same in each process."""
    random = torch.Generator().manual_seed(7)
    base = torch.randn(60, 80, generator=random)
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=random)
    found = {name: bits.view(dtype) for name, dtype in TORCH_DTYPES.items() if name != "bool"}
    found |= {
        "bool": bits > 127,
        "transposed": base.T,
        "strided": base[1::2, ::3],
        "expanded": base[3].expand(5, 80),
        "tied": base,
        "tied again": base,
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(base[:3]),
        "odd size": bits[:1021],
        "conjugate": torch.complex(base[0], base[1]).conj(),
        "one of a column": base[:, 5][2:3],
        "strided 8 bits": bits.view(64, 64).view(torch.float8_e4m3fn)[1::2, ::3],
    }
    if hasattr(torch, "float4_e2m1fn_x2"):
        found["strided 4 bits"] = bits.view(64, 64).view(torch.float4_e2m1fn_x2)[::2, 1::3]
    return found


def tiny_tensors() -> list[torch.Tensor]:
    """Thousands of tensors of a few bytes, none like its neighbour."""
    return [torch.full((1 + i % 7,), i, dtype=torch.int32) for i in range(TINY)]


def large_tensor(value: int, size_bytes: int = OVERSIZED_BYTES) -> torch.Tensor:
    """A tensor of recognisable content."""
    return torch.arange(value, value + size_bytes // 8)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as bytes, whatever they are: NaNs compare, too."""
    flat = tensor.detach().cpu().resolve_conj()
    if flat.itemsize == 1:
        flat = flat.view(torch.uint8)
    return flat.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def expect(condition: bool, what: str) -> None:
    """Raise AssertionError unless a condition holds."""
    if not condition:
        raise AssertionError(what)


@contextlib.contextmanager
def expected(*kinds: type[BaseException], otherwise: str) -> Iterator[None]:
    """Raise AssertionError unless one of some errors is raised."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(otherwise)


@contextlib.contextmanager
def nothing_left(*, within_s: float = 60.0) -> Iterator[None]:
    """Raise AssertionError if threads, descriptors or shared files are there that were not before."""
    before = _belongings()
    yield
    left = _left_since(before, within_s)
    expect(not left, f"left behind: {sorted(left)}")


def leaves_nothing(action: Callable[[], object], *, rounds: int = 3, within_s: float = 60.0) -> None:
    """Raise AssertionError if an action leaves something behind that was not there before.

    What connections consist of may be somebody else's in this process, as Ray opens its own when it likes: it
    counts if each of several rounds leaves some. Threads, shared files and other descriptors count at once.
    """
    for later in reversed(range(rounds)):
        before = _belongings()
        action()
        left = _left_since(before, within_s, settle_s=min(within_s, _SETTLE_S) if later else within_s)
        if not left:
            return
        expect(bool(later) and all(map(_is_of_connection, left)), f"left behind: {sorted(left)}")


def _left_since(before: set[str], within_s: float, settle_s: float | None = None) -> set[str]:
    """What was not there before and does not go; after a shorter time, if connections alone are left."""
    began = time.monotonic()
    while left := _belongings() - before:
        alone = settle_s is not None and all(map(_is_of_connection, left))
        if time.monotonic() - began >= (settle_s if alone and settle_s is not None else within_s):
            break
        threading.Event().wait(0.02)
    return left


def _is_of_connection(belonging: str) -> bool:
    kinds = ("of socket:", "of anon_inode:[eventfd]", "of anon_inode:[eventpoll]")
    return any(kind in belonging for kind in kinds)


@contextlib.contextmanager
def bounded_memory(size_bytes: int, what: str) -> Iterator[None]:
    """Raise AssertionError if this process's own memory grows by more than that meanwhile."""
    peak, ended = [own_memory()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], own_memory())

    before, watcher = own_memory(), threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    grown = max(peak[0], own_memory()) - before
    expect(grown <= size_bytes, f"{what} took {grown} bytes of memory, over {size_bytes}")


def own_memory() -> int:
    """Bytes that this process has to itself; shared memory does not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def process_id(_: Any) -> int:
    """Run by a peer."""
    return os.getpid()


def files_left(folder: Path) -> list[Path]:
    """The files of sessions of shared memory that nobody is in any more.

    The others are those of processes that live: of this one, which has a descriptor of each session that it
    is in, or of some other one.
    """
    ended = [path.stem for path in folder.glob("*.session") if is_free(path)]
    return [path for name in ended for path in (*folder.glob(f"{name}.session"), *folder.glob(f"{name}-*"))]


def _belongings() -> set[str]:
    threads = {f"thread {thread.name}" for thread in threading.enumerate()}
    shared = Path(f"/dev/shm/raycrew-{os.geteuid()}")
    files = {f"file {path}" for path in files_left(shared)}
    descriptors = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            descriptors.add(f"descriptor {fd.name} of {fd.readlink()}")
    return threads | files | {d for d in descriptors if "/proc/" not in d}
