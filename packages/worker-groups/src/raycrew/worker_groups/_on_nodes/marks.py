"""The mark of a worker, which all that it starts carries on, and which nobody can guess.

A variable of the environment is inherited by what is executed, a mapping with a name by what is only forked:
one of the two is in every descendant, whatever session it is in and whoever its parent is by now. Standard
library only: a node's watch is sent this module by value, whatever its environment has.
"""

import mmap
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "RAYCREW_WORKER_MARKS"

_IN_ENVIRONMENT = re.compile(rb"(?:^|\0)" + VARIABLE.encode() + rb"=([0-9a-f:]+)")
_IN_MAPPINGS = re.compile(rb"/memfd:raycrew-worker-([0-9a-f]+)")
_kept: list[mmap.mmap] = []


def mark_own_process() -> str:
    """Mark this process, before any code of the user's runs in it."""
    mark = secrets.token_hex(16)
    os.environ[VARIABLE] = _with(mark, os.environ)  # besides that of a worker that started this one's Ray
    descriptor = os.memfd_create(f"raycrew-worker-{mark}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        _kept.append(mmap.mmap(descriptor, mmap.PAGESIZE))
    finally:
        os.close(descriptor)
    return mark


def marked(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """An environment for a process that is to be found with all that it starts, and its mark."""
    mark = secrets.token_hex(16)
    return {**environ, VARIABLE: _with(mark, environ)}, mark


def _with(mark: str, environ: Mapping[str, str]) -> str:
    inherited = environ.get(VARIABLE)
    return f"{inherited}:{mark}" if inherited else mark


def marks_of(pid: int) -> frozenset[str] | None:
    """The marks that a process carries; None where that can't be told (yet: it is just being started)."""
    try:
        # In this order: what is executed in between has lost its mappings, and has its environment by then.
        mappings = Path(f"/proc/{pid}/maps").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    inherited = [mark for found in _IN_ENVIRONMENT.findall(environment) for mark in found.split(b":")]
    marks = frozenset(mark.decode() for mark in (*inherited, *_IN_MAPPINGS.findall(mappings)))
    return marks if marks or environment else None
