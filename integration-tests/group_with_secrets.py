"""A script: where in Ray's state and files the secrets of a group are found, and a note that is no secret.

`python group_with_secrets.py`, with `MY_API_KEY`, `GROUP_TOKEN` and `NOTE` set; JSON is on the last line.
"""

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import urllib.request
from pathlib import Path

import ray
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ray import cloudpickle
from ray.util import state

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError, timeline
from raycrew.worker_groups.__main__ import main as command

NAMES = ("MY_API_KEY", "GROUP_TOKEN", "NOTE")
KINDS = ("actors", "tasks", "workers", "jobs", "runtime_envs", "nodes", "placement_groups", "objects")


class Judge:
    def seen(self) -> list[str]:
        sys.stdout.write(f"noted: {os.environ['NOTE']}\n")
        sys.stdout.flush()
        return [os.environ.get(name, "") for name in NAMES]

    def fail(self) -> None:
        raise ValueError("this fails")

    def reveal(self) -> None:
        """Print all, and raise it with a note and a cause: where users do so, diagnoses leave it out."""
        told = " ".join(os.environ.get(name, "") for name in NAMES)
        sys.stderr.write(f"{told}\n")
        error = ValueError(f"with {told}")
        error.add_note(told)
        raise error from KeyError(told)

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    with (
        init_ray(
            "local", num_cpus=4, dashboard=True, object_store_memory=80 << 20,
            secrets=["MY_API_KEY"],
        ) as connection,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        tempfile.TemporaryDirectory() as diagnoses,
        RayWorkerGroup(
            cluster, Judge, name_prefix=os.environ["NOTE"], secrets=["GROUP_TOKEN"], diagnose=diagnoses
        ) as group,
        timeline(metrics=True, open_telemetry=True) as run,
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
            said, pickled = "".join(traceback.format_exception(error)), text_of(error)
        found = found_in(connection.dashboard_url, connection.session_dir)
        elsewhere = {
            "repr": repr(group) + str(group) + repr(vars(connection).keys()),
            "error": said,
            "error, pickled": pickled,
            "timeline": json.dumps(run.trace()) + run.html(),
            "metrics": metrics_with(os.environ["NOTE"]),
            "spans": "".join(span.to_json() for span in spans.get_finished_spans()),
            "command lines": text_of_files(Path("/proc"), "[0-9]*/cmdline"),
            "pickle": text_of(group),
            "pickled handle": text_of(group.handle()),
            **{f"raycrew {name}": said_by(name) for name in ("status", "stacks", "top")},
        }
        with contextlib.suppress(WorkerFailureError):
            group.call("reveal").get_results(timeout=60)
        group.diagnose(diagnoses)
        elsewhere["diagnosis"] = text_of_files(Path(diagnoses))
        elsewhere["diagnosis from outside"] = said_by("diagnose", "--folder", diagnoses) + text_of_files(
            Path(diagnoses)
        )
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


def text_of(value: object) -> str:
    """What is in its pickle."""
    return cloudpickle.dumps(value).decode(errors="replace")


def text_of_files(folder: Path, which: str = "**/*") -> str:
    """All that is in some files of a folder."""
    texts = []
    for path in folder.glob(which):
        with contextlib.suppress(OSError):
            texts.append(path.read_bytes().decode(errors="replace"))
    return "".join(texts)


def metrics_with(note: str) -> str:
    """What Prometheus is told, once Ray, which does so with some delay, tells of a group with this name."""
    (node,), deadline = ray.nodes(), time.monotonic() + 60
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    while True:
        with urllib.request.urlopen(url, timeout=30) as answer:
            told = str(answer.read().decode())
        if note in told or time.monotonic() > deadline:
            return told
        time.sleep(0.5)


def said_by(*arguments: str) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        command([*arguments, "--json"])
    return said.getvalue()


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
