"""What a subcommand of `raycrew` is made of that looks at a running cluster.

A package brings one by an entry point of the group `raycrew.cluster_commands` that names a function
`main(arguments, prog)`, which calls `run`:

```python
def main(arguments: Sequence[str], prog: str = "raycrew gadgets") -> int:
    \"\"\"Show gadgets.\"\"\"
    return run(arguments, prog, "Show gadgets.", lambda parser: None, lambda options: Outcome([], "none"))
```

`raycrew` finds the cluster and presents its token before it loads such a subcommand, as Ray reads the token
when it is imported.
"""

import argparse
from collections.abc import Callable, Sequence

from raycrew.cluster_core._command_line import Outcome, Printable, add_address, complain, parser_class, show
from raycrew.cluster_core._connection import connection_advice, init_ray, prepare_visit
from raycrew.cluster_core.errors import ClusterError

__all__ = ["Outcome", "Printable", "run"]

_USAGE, _INTERRUPTED = 2, 130


def run(
    arguments: Sequence[str],
    prog: str,
    description: str,
    configure: Callable[[argparse.ArgumentParser], object],
    command: Callable[[argparse.Namespace], Outcome],
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Read a command's arguments, connect, run it, say what it found; returns its exit code.

    Args:
        arguments: What stands behind the command's name. `--json` and `--address` are options of each.
        prog: What the command is called.
        description: What it does, for its help.
        configure: Adds further options to the parser.
        command: Called with the options, connected to the cluster.
        failures: What `command` raises, besides errors of clusters, bad values and files: told as a line.
    """
    as_json = "--json" in arguments
    told: tuple[type[Exception], ...] = (ClusterError, ValueError, OSError, *failures)
    parser = parser_class(arguments)(prog, description=description, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_address(parser)
    configure(parser)
    options = parser.parse_args(arguments)
    try:
        options.address = prepare_visit(options.address)
        with init_ray(options.address):
            outcome = command(options)
    except KeyboardInterrupt:
        complain("", "interrupted", as_json=as_json)
        return _INTERRUPTED
    except told as error:
        complain(type(error).__name__, str(error), connection_advice(error), as_json=as_json)
        return _USAGE
    show(outcome.data, outcome.shown, as_json=as_json)
    return outcome.code
