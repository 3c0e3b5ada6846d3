"""All that a node's watch can find out about a worker that is wanted for a diagnosis.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from raycrew.worker_groups._on_nodes.leavings import output_of, record_of
from raycrew.worker_groups._on_nodes.process_table import Process
from raycrew.worker_groups._on_nodes.stacks import stacks_of

T = TypeVar("T")

#: What is wanted of a worker, by name: `log_paths` and `lines` of each, `rank` and `prefixes` of records,
#: whether `stacks`. Names that are not there are not wanted. All that is told takes `share_bytes` at most,
#: where what is no record is written twice.
Wanted = Mapping[str, Any]

_MOST_BYTES = 1 << 20  # of stacks, and of each file of output


async def examine(process: Process, mark: str, wanted: Wanted, timeout_s: float) -> dict[str, Any]:
    """Stacks, output and record of a worker as far as they are wanted, whatever it is at.

    Each part is there, or says why it is not, after `timeout_s`.
    """
    parts, share_bytes = {}, wanted["share_bytes"]
    if wanted.get("stacks"):
        stacks = _cut(stacks_of(process, mark, timeout_s), min(_MOST_BYTES, share_bytes // 16))
        parts["stacks"] = _or_why_not(stacks, lambda why: (why, ""))
    if "lines" in wanted:
        most_bytes = min(_MOST_BYTES, share_bytes // 16)
        read = _read(timeout_s, output_of, wanted["log_paths"], wanted["lines"], most_bytes)
        parts["output"] = _or_why_not(read, lambda why: ("", why))
    if "rank" in wanted:
        where = (wanted["rank"], wanted["prefixes"], process.started, os.environ, share_bytes // 2)
        parts["record"] = _or_why_not(_read(timeout_s, record_of, *where), lambda why: ("", b"", why))
    return dict(zip(parts, await asyncio.gather(*parts.values()), strict=True))


async def _cut(stacks: Awaitable[tuple[str, str]], most: int) -> tuple[str, str]:
    text, told_by = await stacks
    if len(text) <= most:
        return text, told_by
    return f"{text[:most]}\nall that follows is left out: these are {len(text)} letters", told_by


async def _read(timeout_s: float, read: Callable[..., T], *args: Any) -> T:
    """What is read from files, in a thread, for a file system may not answer."""
    return await asyncio.wait_for(asyncio.to_thread(read, *args), timeout_s)


async def _or_why_not(part: Any, without: Callable[[str], Any]) -> Any:
    try:
        return await part
    except TimeoutError:
        return without("it could not be had in time")
    except Exception as error:  # noqa: BLE001 - told in place of the part: the others are there all the same
        return without(f"its node's watch can't find it out: {type(error).__name__}: {error}")
