"""A Ray of one's own for a suite: in a folder under /tmp, with this folder on its workers' path."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray


@contextlib.contextmanager
def own_ray(object_store_mib: int) -> Iterator[None]:
    """Ray on four cores; it ends with the block."""
    folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")
    Path(folder, "ray").mkdir()
    os.environ["RAY_TMPDIR"] = folder
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=object_store_mib << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        yield
    finally:
        ray.shutdown()
