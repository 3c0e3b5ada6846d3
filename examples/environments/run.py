"""Two kinds of workers whose dependencies exclude each other: `python examples/environments/run.py`.

The trainer was written for release 1 of a library, the engine for release 2, and no environment can hold
both. Each kind gets one of its own; the driver has neither, and names the classes (in `kinds.py`) without
importing them. Both releases are published to a small index on the spot, so that nothing is downloaded
but what the driver has itself.
"""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.venv_manager import (
    ActorEnvironmentRegistry,
    EnvironmentSpec,
    RegistryEnvironmentProvider,
    explain,
    identify,
)
from raycrew.venv_manager.testing import LocalIndex
from raycrew.worker_groups import RayWorkerGroup

HERE = Path(__file__).parent
RELEASES = {
    "1.0": 'VERSION = "1.0"\n\n\ndef encode(text):\n    return [ord(letter) for letter in text]\n',
    "2.0": 'VERSION = "2.0"\n\n\ndef encode(text, *, start):\n    return [start, *map(ord, text)]\n',
}


def publish(folder: Path) -> LocalIndex:
    """An index with both releases."""
    index = LocalIndex(folder)
    for version, code in RELEASES.items():
        index.add("demo-tokens", version, files={"demo_tokens/__init__.py": code})
    return index


def specs_of(index: LocalIndex) -> dict[str, EnvironmentSpec]:
    """Full name of each kind's class, and what it needs."""
    needs = {"kinds.Trainer": "demo-tokens<2", "kinds.Engine": "demo-tokens>=2"}
    return {
        name: EnvironmentSpec.requirements([requirement], indexes=(index.url,))
        for name, requirement in needs.items()
    }


def encode(cluster: RayVirtualCluster, specs: dict[str, EnvironmentSpec]) -> dict[str, list[object]]:
    """Have each kind encode a text, in its environment; gives each rank's result by class."""
    registry = ActorEnvironmentRegistry()
    for name, spec in specs.items():
        registry.register(name, spec)
    provider = RegistryEnvironmentProvider(registry)
    results: dict[str, list[object]] = {}
    for name in specs:
        # The workers find `kinds.py` beside this file; a framework that is installed needs no such variable.
        with RayWorkerGroup(
            cluster, name, environments=provider, env_vars={"PYTHONPATH": str(HERE)}
        ) as group:
            results[name] = list(group.call("encode", "ab").get_results(timeout=60))
    return results


def main() -> None:
    """Build what is missing, and have both kinds work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one worker of each kind in place of two")
    options = parser.parse_args()
    console = Console()
    with (
        tempfile.TemporaryDirectory() as folder,
        init_ray(num_cpus=4),
        RayVirtualCluster([1 if options.quick else 2], use_gpus=False) as cluster,
    ):
        specs = specs_of(publish(Path(folder)))
        for name, results in encode(cluster, specs).items():
            console.print(f"{name}: {results}")
        for line in explain(*map(identify, specs.values())):
            console.print(f"they differ: {line}", soft_wrap=True)


if __name__ == "__main__":
    main()
