"""Environments: over plain `uv sync`, when they are there already, under many callers, and on the disk."""

import contextlib
import functools
import http.server
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Figure, figure, ratio, seconds
from raycrew.venv_manager import EnvironmentSpec, Store, ensure
from raycrew.venv_manager._uv.process import find_uv
from raycrew.venv_manager.testing import FakeUv, LocalIndex, write_project

PACKAGES, MODULES, DATA_BYTES = 40, 60, 4_000_000


def run(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="raycrew-bench-") as name, _served(Path(name)) as url:
        bench = _Bench(Path(name), url, quick)
        return [bench.present(), *bench.processes(), *bench.builds(), *bench.callers(), bench.disk()]


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serve a folder by HTTP, as an index is: uv treats files of the same machine in another way."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Bench:
    """One small index of forty packages, and a locked project that needs them all."""

    def __init__(self, folder: Path, url: str, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        index = LocalIndex(folder / "index")
        names = [f"part{n}" for n in range(PACKAGES)]
        for name in names:
            files = {f"{name}/m{n}.py": f"VALUE = {n}\n" * 20 for n in range(MODULES)}
            index.add(
                name, "1.0", files=files | {f"{name}/__init__.py": "", f"{name}/data": os.urandom(DATA_BYTES)}
            )
        self.environ = index.environ(folder / "cache") | {"UV_DEFAULT_INDEX": f"{url}/index/simple"}
        self.project = write_project(folder / "project", dependencies=names)
        self.uv = find_uv()
        self._uv("lock", "-q", "--project", self.project)
        self.spec = EnvironmentSpec.project(self.project, locked=True, carry=False)
        self.count = 0
        self.inventories: list[float] = []

    def _uv(self, *words: str | Path, **variables: str) -> None:
        subprocess.run([self.uv, *words], env=self.environ | {"UV_NO_CONFIG": "1"} | variables, check=True)

    def _fresh(self) -> Path:
        self.count += 1
        return self.folder / f"run{self.count}"

    def _plain(self) -> float:
        """Seconds of plain `uv sync`."""
        folder = self._fresh()
        words = ("sync", "-q", "--locked", "--python", sys.executable, "--project", self.project)
        took = seconds(lambda: self._uv(*words, UV_PROJECT_ENVIRONMENT=str(folder)))
        shutil.rmtree(folder)
        return took

    def _ours(self, probes: list[float] | None = None) -> float:
        """Seconds of `ensure`, without those that it spent on nothing but the import probe."""
        store = Store(self._fresh(), environ=self.environ)
        start = time.perf_counter()
        built = ensure(self.spec, store=store)
        took = time.perf_counter() - start
        probe, beside = (built.stamp["seconds"][name] for name in ("probe_s", "inventory_s"))
        took -= max(0.0, probe - beside)  # the inventory is taken meanwhile
        self.inventories.append(beside)
        if probes is not None:
            probes.append(probe)
        shutil.rmtree(store.root)
        return took

    def present(self) -> Figure:
        store = Store(self._fresh(), environ=self.environ)
        ensure(self.spec, store=store)
        samples = [
            1e3 * seconds(lambda: ensure(self.spec, store=store)) for _ in range(20 if self.quick else 200)
        ]
        return figure("ensure, environment present", samples, unit="ms", baseline="-", goal=5.0)

    def processes(self) -> list[Figure]:
        fake = FakeUv(self._fresh())
        store = Store(self._fresh(), environ=dict(os.environ) | fake.environ)
        spec = EnvironmentSpec.requirements(["fake"], carry=False)
        ensure(spec, store=store)
        before = len(fake.calls())
        ensure(spec, store=store)
        started = float(len(fake.calls()) - before)
        return [figure("uv processes, environment present", [started], unit="", baseline="-", goal=0.0)]

    def builds(self) -> list[Figure]:
        probes: list[float] = []

        def cold(build: Callable[[], float]) -> float:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
            return build()

        repeat = 3 if self.quick else 9
        note = "without the import probe; bytecode compiled, as by default"
        figures = []
        with self._compiled():
            figures.append(
                ratio(
                    "build, warm cache", lambda: self._ours(probes), self._plain, baseline="uv sync --locked",
                    goal=1.1, repeat=repeat, note=note,
                )
            )  # fmt: skip
            figures.append(
                ratio(
                    "build, cold cache", lambda: cold(self._ours), lambda: cold(self._plain),
                    baseline="uv sync --locked", goal=1.1, repeat=repeat, note=note,
                )
            )  # fmt: skip
        bare = ratio(
            "build, warm cache, no bytecode", self._ours, self._plain, baseline="uv sync --locked", goal=1.1,
            repeat=repeat, note="uv only links files; the inventory, which the probe hides, is counted",
        )  # fmt: skip
        size = f"{PACKAGES} packages of {MODULES} modules"
        shown_apart = (("import probe", probes), (f"inventory of {size}", self.inventories))
        rows = [figure(name, [1e3 * s for s in took], unit="ms", baseline="-") for name, took in shown_apart]
        return [*figures, bare, *rows]

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        before, self.environ = self.environ, self.environ | {"UV_COMPILE_BYTECODE": "1"}
        yield
        self.environ = before

    def callers(self) -> list[Figure]:
        one, many, builds = [], [], []
        for _ in range(2 if self.quick else 5):
            for count, into in ((1, one), (32, many)):
                took, built = self._race(count)
                into.append(took)
                builds.append(float(built))
        return [
            figure(
                "32 callers at once", [b / a for a, b in zip(one, many, strict=True)], unit="x",
                baseline="one caller", goal=1.2, note="from a barrier after the imports",
            ),
            figure("builds for 32 callers", builds, unit="", baseline="-", goal=1.0),
        ]  # fmt: skip

    def _race(self, count: int) -> tuple[float, int]:
        """Seconds from the barrier to the last answer, and how many environments uv made."""
        context = multiprocessing.get_context("spawn")
        root = self._fresh()
        log = self.folder / f"made{self.count}"
        counting = self.folder / "counting-uv"
        counting.write_text(
            f'#!/bin/sh\ncase "$1" in venv | sync) echo >>{log};; esac\nexec {self.uv} "$@"\n'
        )
        counting.chmod(0o755)
        (start, opens), done = context.Pipe(duplex=False), context.SimpleQueue()
        variables = {"RAYCREW_UV": str(counting), "UV_COMPILE_BYTECODE": "1"}  # compiled, as by default
        arguments = (str(root), self.environ | variables, self.spec, start, done)
        processes = [context.Process(target=_call, args=arguments) for _ in range(count)]
        for process in processes:
            process.start()
        for _ in processes:
            done.get()  # has imported everything
        opens.close()  # wakes all of them at once
        begin = time.perf_counter()
        for _ in processes:
            done.get()
        took = time.perf_counter() - begin
        for process in processes:
            process.join()
        shutil.rmtree(root)
        return took, len(log.read_text())

    def disk(self) -> Figure:
        store = Store(self._fresh(), environ=self.environ)
        for n in range(8):
            ensure(self.spec.replace(packages=(f"part{n}==1.0",)), store=store)
        found = store.environments()
        sizes = [int(e.stamp["size_bytes"]) for e in found]
        used = sizes[0] + sum(int(e.stamp["own_bytes"]) for e in found[1:])
        return figure(
            f"disk of {len(found)} environments that share", [used / sizes[0]], unit="x",
            baseline=f"one ({sizes[0] / 1e6:.0f} MB)", goal=1.2, note=f"links: {found[0].stamp['link_mode']}",
        )  # fmt: skip


def _call(root: str, environ: dict[str, str], spec: EnvironmentSpec, start, done) -> None:
    done.put(None)
    with contextlib.suppress(EOFError):
        start.recv()
    ensure(spec, store=Store(root, environ=environ))
    done.put(None)
