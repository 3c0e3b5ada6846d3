"""The process that finds or starts a cluster for `raycrew run`, and keeps one that it started.

It reads what is wanted as a line of JSON, and answers with one. A cluster that it started lives until its
standard input ends, which it does however the process at the other end dies. It is in a session of its own,
so that what a terminal or a shell sends to a whole job does not end the cluster before the command.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any, TextIO

from raycrew.cluster_core._command_line.running.wishes import AROUND, Wish
from raycrew.cluster_core._connection import (
    connection_advice,
    present_token,
    target_of,
)
from raycrew.cluster_core.errors import ClusterError


def main() -> int:
    """Read, answer, and keep."""
    asked, told = sys.stdin.readline(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else is printed in this process is no answer.
    if not asked:
        return 0  # Given up before it began.
    try:
        keep(Wish(**json.loads(asked)), told)
    except BrokenPipeError:
        return 1  # Given up meanwhile.
    except Exception as error:
        if told.closed:
            raise  # The command has its cluster; this is for whoever reads what is printed.
        _tell(told, {"error": _problem(error)})
        return 1
    return 0


def _problem(error: Exception) -> dict[str, str]:
    kind, message = type(error).__name__, str(error)
    if not isinstance(error, (ClusterError, ValueError, TypeError, OSError)):
        message = f"no cluster was found or started: {kind}: {message}"
    return {"kind": kind, "message": message, "advice": connection_advice(error)}


def keep(wish: Wish, told: TextIO) -> None:
    """Find or start a cluster, tell of it, and end what was started when the standard input ends."""
    target = target_of(wish.address, os.environ, wish.start.get("temp_dir"))
    if target.address is not None:
        target = replace(target, address=present_token(target.address))
    options, note = wish.options_for(target)
    from raycrew.cluster_core._connection import init_ray  # Ray reads the token as it is imported.

    with init_ray(**options, forward_env=None, timeout_s=wish.timeout_s) as connection:
        is_named = wish.address not in (None, "auto")
        answer = {
            "address": connection.address,
            "started": connection.started_here,
            "why": (wish.said_by if is_named else target.why) + note,
            "env": {**connection.child_env(), AROUND: connection.address},
        }
        _tell(told, answer)
        if connection.started_here:
            sys.stdin.read()


def _tell(told: TextIO, answer: dict[str, Any]) -> None:
    with told:
        told.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    sys.exit(main())
