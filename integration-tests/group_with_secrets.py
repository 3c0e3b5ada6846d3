"""A script: where in Ray's state and files the secrets of a group are found, and a note that is no secret.

`python group_with_secrets.py`, with `MY_API_KEY`, `GROUP_TOKEN` and `NOTE` set; JSON is on the last line.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from ray import cloudpickle
from ray.util import state

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError, timeline

NAMES = ("MY_API_KEY", "GROUP_TOKEN", "NOTE")
KINDS = ("actors", "tasks", "workers", "jobs", "runtime_envs", "nodes", "placement_groups", "objects")


class Judge:
    def seen(self) -> list[str]:
        sys.stdout.write(f"noted: {os.environ['NOTE']}\n")
        sys.stdout.flush()
        return [os.environ.get(name, "") for name in NAMES]

    def fail(self) -> None:
        raise ValueError("this fails")

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    with (
        init_ray(
            "local", num_cpus=4, dashboard=True, object_store_memory=80 << 20,
            secrets=["MY_API_KEY"],
        ) as connection,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Judge, name_prefix=os.environ["NOTE"], secrets=["GROUP_TOKEN"]
        ) as group,
        timeline() as run,
    ):  # fmt: skip
        wanted = [os.environ[name] for name in NAMES]
        seen = group.call("seen").get_results(timeout=60)
        os.kill(group.call("pid").get_results(timeout=60)[0], signal.SIGKILL)
        while not group.restart_failed_workers():
            time.sleep(0.05)
        seen += group.call("seen").get_results(timeout=60)
        try:
            group.call("fail").get_results(timeout=60)
        except WorkerFailureError as error:
            said = "".join(traceback.format_exception(error))
        found = found_in(connection.dashboard_url, connection.session_dir)
        elsewhere = {
            "repr": repr(group) + str(group) + repr(vars(connection).keys()),
            "error": said,
            "timeline": json.dumps(run.trace()) + run.html(),
            "diagnosis": text_of_files(group.diagnose(connection.session_dir).folder),
            "pickle": cloudpickle.dumps(group).decode(errors="replace"),
        }
        for name, places in found.items():
            places += [where for where, text in elsewhere.items() if os.environ[name] in text]
    sys.stdout.write(json.dumps([all(s == wanted for s in seen), found]) + "\n")


def found_in(url: str, folder: str) -> dict[str, list[str]]:
    """Variable to the places that hold its value, once Ray tells of the calls and of what workers wrote."""
    deadline = time.monotonic() + 60
    while True:
        texts = texts_of(url, folder)
        found = {name: [w for w, text in texts.items() if os.environ[name] in text] for name in NAMES}
        logged = any("worker-" in where for where in found["NOTE"])
        if (logged and "seen" in texts["tasks"]) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def text_of_files(folder: Path) -> str:
    """All that is in the files of a folder."""
    return "".join(p.read_bytes().decode(errors="replace") for p in folder.rglob("*") if p.is_file())


def texts_of(url: str, folder: str) -> dict[str, str]:
    """What Ray tells of its state, by kind, and what it wrote down, by file."""
    told = {
        kind: json.dumps(
            [vars(one) for one in getattr(state, f"list_{kind}")(url, detail=True, limit=1000)], default=str
        )
        for kind in KINDS
    }
    files = (p for p in Path(folder).rglob("*") if p.is_file() and not p.is_symlink())
    return told | {str(p): p.read_bytes().decode(errors="replace") for p in files}


if __name__ == "__main__":
    main()
