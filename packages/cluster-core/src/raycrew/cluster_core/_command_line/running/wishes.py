"""What `raycrew run` is told: by its arguments, by files, by the environment; and who has the last word."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from raycrew.cluster_core._connection import ENV_FILE, ClusterConfig, Layers, Target, layers_of

AROUND = "RAYCREW_RUN_ADDRESS"  # In the environment of a command: the cluster of the `raycrew run` around it.
FAILED = 125  # As of `env` and `timeout`: not the command, but what was to run it.

_ADDRESS = "ray_head_node_address"
_OF_A_START = ("num_cpus", "num_gpus", "resources", "object_store_memory", "temp_dir", "dashboard", "log_dir")
_EPILOG = """\
What the command line says goes over the cluster of a raycrew run around this one, that over env.yaml, that
over --config files, the last of these over the first, and all of them over RAY_ADDRESS. Where nothing names a
cluster, one on this machine is joined if a worker of it started this, a Slurm job or `ray start` made it, or
raycrew started it for the same devices; else one is started, which ends with the command.

Exit codes: the command's; 128 + N where signal N ended it; 127 where it is not found, 126 where it can't be
run, 125 where raycrew run itself failed (bad usage, no such cluster).
"""


@dataclass(frozen=True, slots=True)
class Wish:
    """A cluster that is wanted.

    Attributes:
        address: As `init_ray` takes it, or None.
        said_by: Who named the address; "" where nobody did.
        start: Arguments of `init_ray` for a cluster that is started.
        insisted: Names of those that the command line gave.
        timeout_s: Seconds until an address that does not answer is given up.
    """

    address: str | None = None
    said_by: str = ""
    start: Mapping[str, Any] = field(default_factory=dict)
    insisted: tuple[str, ...] = ()
    timeout_s: float = 10.0

    def as_json(self) -> dict[str, Any]:
        """It as JSON can hold it."""
        return asdict(self)

    def options_for(self, target: Target) -> tuple[dict[str, Any], str]:
        """Arguments of `init_ray` for a cluster, and what is to be noted about those that were wanted.

        Raises:
            ValueError: The command line gives options of a start, and names a cluster that runs.
        """
        if target.address is None:
            return {"address": "local", **self.start}, ""
        if self.insisted and not target.is_found:
            raise ValueError(
                f"{', '.join(self.insisted)} can't be given for a running cluster, and {target.address} is "
                "one; for one of its own, pass --address local"
            )
        note = f"; {', '.join(self.start)} say nothing to a running cluster" if self.start else ""
        return {"address": target.address}, note


@dataclass(frozen=True, slots=True)
class Order:
    """A command to run, and beside which cluster.

    Attributes:
        command: The command and its arguments.
        wish: The cluster.
        grace_s: Seconds from an asked end of the command until it is killed.
    """

    command: tuple[str, ...]
    wish: Wish
    grace_s: float


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: {message}\n")


def parser(prog: str) -> argparse.ArgumentParser:
    """The options of `raycrew run`."""
    options = _Parser(
        prog,
        usage=f"{prog} [options] [NAME=VALUE …] -- COMMAND [ARGUMENT …]",
        description="Run a command beside a cluster that is found or started: it, and what it starts, join "
        "that cluster by init_ray() or ray.init().",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument(
        "--address", help="host:port, ray://host:port, auto (never start one) or local (always start one)"
    )
    options.add_argument("--num-cpus", type=int, help="CPUs of a cluster that is started")
    options.add_argument("--num-gpus", type=int, help="GPUs of a cluster that is started")
    options.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE",
        help="YAML file with ray_head_node_address, num_cpus … in its section cluster or at its top; more "
        "than once: each goes over the ones before",
    )  # fmt: skip
    options.add_argument(
        "--env-file",
        type=Path,
        metavar="FILE",
        help="in place of env.yaml in this folder, which may be missing",
    )
    options.add_argument(
        "--timeout", type=_seconds, default=10.0, help="seconds for an address to answer (default: 10)"
    )
    options.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        help="seconds from SIGTERM or SIGHUP until the command is killed (default: 10)",
    )
    options.add_argument(
        "overrides", nargs="*", metavar="NAME=VALUE", help="a value of the configuration, as in num_cpus=4"
    )
    return options


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def read_order(arguments: Sequence[str], environ: Mapping[str, str], prog: str = "raycrew run") -> Order:
    """Understand a command line; the first `--` ends the options, all behind it is the command's.

    Raises:
        SystemExit: Of code 125 where it means nothing, of 0 after help.
        OSError: A file can't be read.
        ValueError: A file or an override means nothing.
        TypeError: A value has the wrong type.
    """
    words = parser(prog)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = words.parse_intermixed_args(arguments[:end])
    command = tuple(arguments[end + 1 :])
    if not command:
        words.error(f"which command? It stands behind --, as in: {prog} -- python train.py")
    return Order(command, wish_of(options, environ), options.grace)


def wish_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Wish:
    """The cluster that is wanted, everybody having had a say.

    Raises:
        OSError: A file can't be read.
        ValueError: A file or an override means nothing.
        TypeError: A value has the wrong type.
    """
    layers = _layers(options)
    said_by = f"{_ADDRESS} in {layers.origins.get(_ADDRESS)}"
    around = environ.get(AROUND)
    if around and around == environ.get("RAY_ADDRESS"):
        layers.lay({_ADDRESS: around}, "")
        said_by = "the raycrew run around this one has it"
    amounts = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    overrides = [f"{name}={amount}" for name, amount in amounts.items() if amount is not None]
    overrides = [*options.overrides, *overrides]
    config = ClusterConfig.from_mapping(layers.values).with_overrides(overrides)
    said = dict.fromkeys(map(_name, overrides))
    if idle := [name for name in said if name not in (_ADDRESS, *_OF_A_START)]:
        raise ValueError(
            f"{', '.join(idle)} would say nothing to the command, which may read configuration files itself; "
            f"of a cluster, the command line names {', '.join((_ADDRESS, *_OF_A_START))}"
        )
    if _ADDRESS in said:
        said_by = f"{_ADDRESS} on the command line"
    if options.address is not None:
        config, said_by = replace(config, ray_head_node_address=options.address), "--address names it"
    wanted = config.connection_options()
    return Wish(
        config.ray_head_node_address,
        said_by if config.ray_head_node_address else "",
        {name: wanted[name] for name in _OF_A_START if name in wanted},
        tuple(name for name in said if name in _OF_A_START and name in wanted),
        options.timeout,
    )


def _layers(options: argparse.Namespace) -> Layers:
    """What the files say."""
    env_file = options.env_file or ENV_FILE
    if options.env_file is not None:
        options.env_file.stat()  # Only the usual one may be missing.
    layers = layers_of(options.config, None, "cluster")
    try:
        own = layers_of((), env_file, "cluster")
    except ValueError as error:
        raise ValueError(f"{error}; --env-file /dev/null reads none") from None
    layers.lay(own.values, str(env_file))
    return layers


def _name(override: str) -> str:
    return override.partition("=")[0].strip().removeprefix("cluster.").partition(".")[0]
