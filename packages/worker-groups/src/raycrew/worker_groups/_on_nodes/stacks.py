"""The stacks of a worker's threads, whatever they are at: offered by it, taken by its node's watch.

Python writes them when a signal comes, without the interpreter's lock. What it writes into is memory with a
name, found by the worker's mark. py-spy is asked first where it is installed, as it knows the threads' names.
Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import asyncio
import faulthandler
import fcntl
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from raycrew.worker_groups._on_nodes.process_table import Process, opened, read_entry, runs, send

_MOST_BYTES = 1 << 20  # of stacks, before what was written of earlier ones is thrown away
_LOOK_S = 0.02
_QUIET_LOOKS = 3  # after so many without a new line all is written
_PY_SPY_S = 10.0
_kept: list[int] = []


def _signal() -> int:
    """Of those for programs' own use, one that hardly any program uses."""
    return signal.SIGRTMAX - 7


def offer_stacks(mark: str) -> None:
    """Have this process write the stacks of its threads when its node's watch asks for them."""
    descriptor = os.memfd_create(f"raycrew-stacks-{mark}", os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(_signal(), file=descriptor, all_threads=True, chain=False)
    _kept.append(descriptor)


async def stacks_of(process: Process, mark: str, timeout_s: float) -> tuple[str, str]:
    """The stacks of a worker's threads, and what told them; or why there are none, and nothing.

    Args:
        process: The worker's own process.
        mark: Its mark.
        timeout_s: For how long the worker may take.
    """
    deadline = time.monotonic() + timeout_s
    entry = read_entry(process.pid)
    if entry is None or entry.process != process:
        return "its process has ended", ""
    found = await _asked_of_py_spy(process, min(timeout_s / 2, _PY_SPY_S))
    if found:
        return found, "py-spy"
    if entry.state in "Tt":
        return "its process is stopped, and py-spy is not there or may not look", ""
    return await _written(process, mark, deadline)


def _py_spy() -> str | None:
    """Where py-spy is installed, if it is."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


async def _asked_of_py_spy(process: Process, timeout_s: float) -> str:
    """What py-spy tells; nothing where it is not installed, may not look, or is late."""
    program = _py_spy()
    if program is None or not runs(process):
        return ""
    try:
        spy = await asyncio.create_subprocess_exec(
            program,
            # What stops another process and is itself killed may leave that one stopped.
            *("dump", "--nonblocking", "--pid", str(process.pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        told, _ = await asyncio.wait_for(spy.communicate(), timeout_s)
    except TimeoutError:
        with suppress(ProcessLookupError):
            spy.kill()
        await spy.wait()
        return ""
    return told.decode(errors="replace").strip() if spy.returncode == 0 else ""


async def _written(process: Process, mark: str, deadline: float) -> tuple[str, str]:
    memory = opened(process.pid, f"/memfd:raycrew-stacks-{mark}", os.O_RDWR)
    if memory is None or not _is_awaited(process.pid):
        if memory is not None:
            os.close(memory)
        return "it does not offer them (any more), and py-spy is not there or may not look", ""
    try:
        if not await _is_ours(memory, deadline):
            return "others ask for them too, and it did not answer all in time", ""
        before = os.fstat(memory).st_size
        if before > _MOST_BYTES:
            os.ftruncate(memory, before := 0)
        if problem := _problem_of_sending(process):
            return problem, ""
        size = await _settled_size(memory, before, deadline)
        text = os.pread(memory, size - before, before).decode(errors="replace").strip()
        return (text, "faulthandler") if text else ("it did not answer in time", "")
    except OSError as error:
        return f"they can't be read: {error}", ""
    finally:
        os.close(memory)


async def _is_ours(memory: int, deadline: float) -> bool:
    """Wait until nobody else asks, this node's other watches included; over once it is closed."""
    while True:
        try:
            fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        else:
            return True


def _problem_of_sending(process: Process) -> str:
    try:
        return "" if send(process, _signal()) else "its process has ended"
    except OSError as error:
        return f"it can't be sent a signal: {error}"


async def _settled_size(memory: int, before: int, deadline: float) -> int:
    """How much there is once nothing is written any more, or the time is over."""
    size, quiet = before, 0
    while (size == before or quiet < _QUIET_LOOKS) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        now = os.fstat(memory).st_size
        quiet = quiet + 1 if now == size else 0
        size = now
    return size


def _is_awaited(pid: int) -> bool:
    """Whether a process does something of its own on the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:")), 0)
    return bool(caught >> (_signal() - 1) & 1)
