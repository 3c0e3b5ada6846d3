"""All that a node's watch can find out about a worker that is wanted for a diagnosis.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from raycrew.worker_groups._on_nodes.leavings import output_of, record_of
from raycrew.worker_groups._on_nodes.process_table import Process
from raycrew.worker_groups._on_nodes.stacks import stacks_of

T = TypeVar("T")

#: What is wanted of a worker, by name: `log_paths` and `lines` of each, `rank` and `prefixes` of records,
#: whether `stacks`. Names that are not there are not wanted.
Wanted = Mapping[str, Any]


async def examine(process: Process, mark: str, wanted: Wanted, timeout_s: float) -> dict[str, Any]:
    """Stacks, output and record of a worker as far as they are wanted, whatever it is at.

    Each part is there, or says why it is not, after `timeout_s`.
    """
    parts = {}
    if wanted.get("stacks"):
        parts["stacks"] = _or_why_not(stacks_of(process, mark, timeout_s), lambda why: (why, ""))
    if "lines" in wanted:
        read = _read(timeout_s, output_of, wanted["log_paths"], wanted["lines"])
        parts["output"] = _or_why_not(read, lambda why: ("", why))
    if "rank" in wanted:
        where = (wanted["rank"], wanted["prefixes"], process.started, os.environ)
        parts["record"] = _or_why_not(_read(timeout_s, record_of, *where), lambda why: ("", b"", why))
    return dict(zip(parts, await asyncio.gather(*parts.values()), strict=True))


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
