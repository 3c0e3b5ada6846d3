"""The process that finds or starts a cluster for `raycrew run`, and keeps one that it started.

It reads what is wanted as a line of JSON, and answers with one. A cluster that it started lives until its
standard input ends, which it does however the process at the other end dies. It is in a session of its own,
so that what a terminal or a shell sends to a whole job does not end the cluster before the command.
"""

import json
import os
import sys
from typing import Any

from raycrew.cluster_core._command_line.running.wishes import AROUND, Wish
from raycrew.cluster_core._connection import (
    connection_advice,
    present_token,
    target_of,
)
from raycrew.cluster_core.errors import ClusterError


def main() -> int:
    """Read, answer, and keep."""
    asked, told = sys.stdin.readline(), os.dup(1)
    os.dup2(2, 1)  # Whatever else is printed in this process is no answer.
    if not asked:
        return 0  # Given up before it began.
    try:
        keep(Wish(**json.loads(asked)), told)
    except BrokenPipeError:
        return 1  # Given up meanwhile.
    except (ClusterError, ValueError, TypeError, OSError) as error:
        problem = {"kind": type(error).__name__, "message": str(error), "advice": connection_advice(error)}
        _tell(told, {"error": problem})
        return 1
    return 0


def keep(wish: Wish, told: int) -> None:
    """Find or start a cluster, tell of it, and end what was started when the standard input ends."""
    target = target_of(wish.address, os.environ, wish.start.get("temp_dir"))
    options, note = wish.options_for(target)
    if target.address is not None:
        present_token(target.address)
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


def _tell(told: int, answer: dict[str, Any]) -> None:
    with os.fdopen(told, "w") as pipe:
        pipe.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    sys.exit(main())
