import logging
import os
import pickle
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raycrew.venv_manager import (
    ActorEnvironmentRegistry,
    EnvironmentSpec,
    ProbeError,
    ProvisionError,
    RegistryEnvironmentProvider,
    SpecError,
    Store,
    create_local_venv,
    create_local_venv_on_each_node,
    prefetch,
)
from raycrew.venv_manager.testing import ThreadNodes, write_project


@pytest.fixture
def here(tmp_path, fake_uv, monkeypatch):
    """The default store in a folder of this test, with the fake uv; the driver's own packages stay out."""
    for name, value in fake_uv.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYCREW_VENV_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


SPEC = EnvironmentSpec.requirements(["fake"], carry=False)


class ProcessNodes:
    """Nodes that are processes with nothing in common but files; each is its own host."""

    setup = ""

    def __init__(self, *names):
        self.names = names

    def run_on_each_node(self, fn):
        code = f"""
import pickle, platform, sys
platform.node = lambda: sys.argv[1]
{self.setup}
sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)()))
"""
        running = [
            (
                name,
                subprocess.Popen(
                    [sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                ),
            )
            for name in self.names
        ]
        for _, process in running:
            process.stdin.write(pickle.dumps(fn))
            process.stdin.close()
        for name, process in running:
            answer = process.stdout.read()
            process.wait()
            yield name, pickle.loads(answer)


@pytest.mark.smoke
def test_a_local_environment_under_a_name(here):
    python = create_local_venv(SPEC, "pkg.Worker")
    assert Path(python).parent.parent == (here / "by-name" / "pkg.Worker").resolve()
    assert create_local_venv(SPEC, "other.name") == python


def test_the_older_spelling_of_the_folder_is_honoured(here, monkeypatch, tmp_path):
    monkeypatch.delenv("RAYCREW_VENV_DIR")
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "nemo"))
    assert create_local_venv(SPEC, "x").startswith(str(tmp_path / "nemo"))


def test_an_interpreter_is_probed_and_given_back(tmp_path):
    assert create_local_venv(sys.executable, "system") == sys.executable
    with pytest.raises(SpecError, match="not an interpreter"):
        create_local_venv(str(tmp_path / "python"), "x")
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ProbeError, match="ended with status 3"):
        create_local_venv(str(tmp_path / "python"), "x")


def test_nodes_that_share_files_build_once(here, fake_uv, caplog):
    fake_uv.hold("pip install")

    class Watched(logging.Handler):
        def emit(self, record):
            if "none done; here: fake uv pip install" in record.getMessage():
                fake_uv.release("pip install")

    logger, watched = logging.getLogger("raycrew.venv_manager"), Watched()
    logger.addHandler(watched)
    try:
        with caplog.at_level(logging.INFO):  # what a build does is shown on the driver
            python = create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a", "b", "c"))
    finally:
        fake_uv.release("pip install")
        logger.removeHandler(watched)
    assert Path(python).exists()
    assert len(fake_uv.calls("pip compile")) == len(fake_uv.calls("venv")) == 1
    assert "3 done, the last one c" in caplog.text


def test_a_driver_keeps_what_its_nodes_use_from_other_machines(here):
    code = """
from raycrew.venv_manager import Store, collect
print(*(row.reason for row in collect(Store(), max_bytes=0)))
"""
    create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a", "b"))
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == "in use by a process that asked for it\n"
    assert len(Store(here).environments()) == 1


def test_versions_are_chosen_on_the_driver_and_nodes_need_no_project(tmp_path, index, uv_cache, monkeypatch):
    for name, value in index.environ(uv_cache, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYCREW_VENV_DIR", str(tmp_path / "store"))
    project = write_project(tmp_path / "project", dependencies=["base"])

    class GoneNodes(ProcessNodes):
        def run_on_each_node(self, fn):
            project.rename(tmp_path / "elsewhere")
            yield from super().run_on_each_node(fn)

    spec = EnvironmentSpec.project(project, carry=False)
    python = create_local_venv_on_each_node(spec, "x", GoneNodes("a", "b"))
    assert subprocess.check_output([python, "-c", "import base; print(base.VERSION)"], text=True) == "1.0\n"


def test_a_node_that_joins_later_is_served_on_demand(here, fake_uv):
    nodes = ThreadNodes(["a"])
    python = create_local_venv_on_each_node(SPEC, "x", nodes)
    Store(here).locks(Path(python).parts[-4]).release()
    nodes.names.append("b")
    subprocess.run(["rm", "-r", Path(python).parents[2]], check=True)  # as on a machine that never had it
    assert create_local_venv_on_each_node(SPEC, "x", nodes) == python
    assert len(fake_uv.calls("pip compile")) == 1
    assert len(fake_uv.calls("venv")) == 2


def test_one_node_that_fails_is_named_and_does_not_hide_the_others(here, fake_uv):
    class Broken(ThreadNodes):
        def run_on_each_node(self, fn):
            yield "good", fn()
            fake_uv.fail("venv", "error: No space left on device (os error 28)")
            subprocess.run(["rm", "-r", *here.glob("????????????????????????")], check=True)
            yield "full", fn()

    with pytest.raises(ProvisionError, match="No space left") as caught:
        create_local_venv_on_each_node(SPEC, "x", Broken())
    assert list(caught.value.failures) == ["full"]
    assert platform.node() in caught.value.failures["full"]


def test_an_interpreter_is_checked_on_every_node(tmp_path):
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)

    class Without(ThreadNodes):
        def run_on_each_node(self, fn):
            yield "a", fn()
            path.unlink()
            yield "b", fn()

    with pytest.raises(ProvisionError, match="there is no interpreter") as caught:
        create_local_venv_on_each_node(EnvironmentSpec.interpreter(path), "x", Without())
    assert list(caught.value.failures) == ["b"]


@pytest.fixture
def interpreter(here, fake_uv, tmp_path):
    """What environments of the fake uv link to: a Python that notes each time that it is started."""
    path = tmp_path / "python"

    def write(status=None):
        run = f'exec {sys.executable} "$@"' if status is None else f"exit {status}"
        path.write_text(f"#!/bin/sh\necho . >>{tmp_path}/started\n{run}\n")
        path.chmod(0o755)

    write()
    text = fake_uv.path.read_text()
    fake_uv.path.write_text(text.replace(f"os.symlink({sys.executable!r}", f"os.symlink({str(path)!r}"))
    return path, write, lambda: (tmp_path / "started").read_text().count(".")


def test_an_environment_is_probed_on_each_node_once(interpreter, fake_uv):
    _, write, started = interpreter
    python = create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a", "b", "c"))
    assert started() == 3
    create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a", "b", "c"))
    assert started() == 3
    write(status=3)
    with pytest.raises(ProvisionError, match="ended with status 3") as caught:
        create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a", "d"))
    assert list(caught.value.failures) == ["d"]
    write()
    assert create_local_venv_on_each_node(SPEC, "x", ProcessNodes("d")) == python
    assert started() == 5
    assert len(fake_uv.calls("venv")) == 1


def test_a_node_without_the_python_of_an_environment_does_not_replace_it(here, interpreter, fake_uv):
    path, write, _ = interpreter
    python = create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a"))
    path.unlink()
    with pytest.raises(ProvisionError, match=rf"leads to {path}, which is not on b: a built it") as caught:
        create_local_venv_on_each_node(SPEC, "x", ProcessNodes("b"))
    assert "install that Python" in caught.value.failures["b"]
    write()
    assert create_local_venv_on_each_node(SPEC, "x", ProcessNodes("a", "b")) == python
    assert len(fake_uv.calls("venv")) == 1


def test_another_path_on_a_node_is_an_error_that_names_both(here):
    class Elsewhere(ThreadNodes):
        def run_on_each_node(self, fn):
            yield "a", fn()
            yield "b", {**fn(), "python": "/elsewhere/bin/python"}

    with pytest.raises(ProvisionError, match=r"has it at /elsewhere/bin/python instead of /.*/bin/python"):
        create_local_venv_on_each_node(SPEC, "x", Elsewhere())


def test_a_node_of_another_kind_is_named(here):
    class Foreign(ProcessNodes):
        setup = "platform.machine = lambda: 'riscv64'"

    with pytest.raises(ProvisionError, match=r"chosen for linux-.*, this is linux-riscv64") as caught:
        create_local_venv_on_each_node(SPEC, "x", Foreign("a"))
    assert "need environments of their own" in caught.value.failures["a"]
    assert Store(here).environments() == []


def test_a_runner_with_a_deadline_gets_one_that_is_long_enough(here):
    class Hurried(ThreadNodes):
        given = 1.0

        def run_on_each_node(self, fn, *, timeout_s=1.0):
            self.given = timeout_s
            return super().run_on_each_node(fn)

    nodes = Hurried()
    create_local_venv_on_each_node(SPEC, "x", nodes)
    assert nodes.given >= 3600


def test_the_provider_builds_on_the_nodes_and_knows_when_it_is_not_asked(here, fake_uv):
    registry = ActorEnvironmentRegistry()
    registry.register("pkg.*", SPEC)
    registry.register("plain.Worker", sys.executable)
    provider = RegistryEnvironmentProvider(registry)
    assert provider.python_for("unknown.Worker", None) is None
    assert provider.python_for("plain.Worker", ThreadNodes()) is None
    python = provider.python_for("pkg.Worker", ThreadNodes())
    assert python == provider.python_for("pkg.Other", None)
    assert len(fake_uv.calls("venv")) == 1


@pytest.mark.parametrize("runner", [None, ThreadNodes()])
def test_a_provider_keeps_to_its_store(here, fake_uv, tmp_path, runner):
    registry = ActorEnvironmentRegistry()
    registry.register("pkg.*", SPEC)
    own = Store(tmp_path / "own", environ=dict(os.environ))
    provider = RegistryEnvironmentProvider(registry, store=own)
    assert Path(provider.python_for("pkg.Worker", runner)).is_relative_to(own.root)
    assert not Store().root.exists()


def test_many_threads_that_ask_the_provider_build_once(here, fake_uv):
    registry = ActorEnvironmentRegistry()
    registry.register("pkg.*", SPEC)
    provider = RegistryEnvironmentProvider(registry)
    answers = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(provider.python_for(f"pkg.W{n}", ThreadNodes())))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert len(fake_uv.calls("venv")) == 1


@pytest.mark.hostile
def test_a_forked_process_does_not_wait_for_a_build_that_its_parent_asked_the_provider_for(here):
    class HeldUp(ThreadNodes):
        begun, free = threading.Event(), threading.Event()

        def run_on_each_node(self, fn, *, timeout_s=1.0):
            self.begun.set()
            self.free.wait(60)
            return super().run_on_each_node(fn)

    registry, nodes = ActorEnvironmentRegistry(), HeldUp()
    registry.register("pkg.*", SPEC)
    provider = RegistryEnvironmentProvider(registry)
    building = threading.Thread(target=provider.python_for, args=("pkg.One", nodes))
    building.start()
    assert nodes.begun.wait(60)
    if not (child := os.fork()):
        signal.alarm(60)
        try:
            os._exit(provider.python_for("pkg.Two", None) is None)
        finally:
            os._exit(2)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        nodes.free.set()
        building.join()


def test_prefetch_builds_equal_environments_once_and_reports_all_failures(here, fake_uv):
    registry = ActorEnvironmentRegistry()
    registry.register("a.One", SPEC)
    registry.register("a.Two", SPEC)
    registry.register("a.Three", EnvironmentSpec.requirements(["other"], carry=False))
    found = prefetch(registry)
    assert set(found) == {"a.One", "a.Two", "a.Three"}
    assert found["a.One"] == found["a.Two"] != found["a.Three"]
    assert len(fake_uv.calls("venv")) == 2
    assert prefetch(registry, names=["a.Two"]) == {"a.Two": found["a.Two"]}
    assert prefetch(registry, runner=ProcessNodes("a", "b")) == found
    assert len(fake_uv.calls("venv")) == 2
    with pytest.raises(SpecError, match=r"b\.Four"):
        prefetch(registry, names=["b.Four"])
    fake_uv.fail("pip compile", "error: broken")
    registry.register("a.Four", EnvironmentSpec.requirements(["more"], carry=False))
    with pytest.raises(ProvisionError, match="1 of 4") as caught:
        prefetch(registry)
    assert list(caught.value.failures) == ["a.Four"]


def test_a_machine_builds_only_so_many_environments_at_once(here, fake_uv):
    fake_uv.slow("venv", 0.3)
    seen = []

    def watch(stop):
        while not stop.is_set():
            seen.append(
                len(list(here.glob("????????????????????????/uv.toml"))) - len(Store(here).environments())
            )
            time.sleep(0.01)

    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(stop,))
    watcher.start()
    registry = ActorEnvironmentRegistry()
    for name in "abcdef":
        registry.register(f"pkg.{name}", EnvironmentSpec.requirements([name], carry=False))
    try:
        prefetch(registry, max_builds=6)
    finally:
        stop.set()
        watcher.join()
    assert max(seen) <= 3  # two builds, and one that was published while we counted
    assert len(Store(here).environments()) == 6
