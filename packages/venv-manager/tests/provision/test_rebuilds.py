"""A rebuild is one, however many nodes and workers it is for; nodes build as the driver's store says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builds import SPEC
from test_provision import ProcessNodes, here

from raycrew.venv_manager import (
    ActorEnvironmentRegistry,
    ProvisionError,
    RegistryEnvironmentProvider,
    Store,
    create_local_venv_on_each_node,
    ensure,
    prefetch,
)
from raycrew.venv_manager._waiting import slot
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.testing import ThreadNodes

pytestmark = pytest.mark.hostile
__all__ = ["here"]


class OneByOne(ProcessNodes):
    """Nodes that share files, each of which begins when the one before is done."""

    def run_on_each_node(self, fn):
        for name in self.names:
            yield from ProcessNodes(name).run_on_each_node(fn)


class Apart(ProcessNodes):
    """Nodes whose disk is not the driver's, whose folder has the same path there."""

    def run_on_each_node(self, fn):
        here, aside, theirs = (Path(os.environ["RAYCREW_VENV_DIR"] + end) for end in ("", ".aside", ".node"))
        theirs.mkdir(exist_ok=True)
        here.rename(aside)
        theirs.rename(here)
        try:
            yield from list(super().run_on_each_node(fn))
        finally:
            here.rename(theirs)
            aside.rename(here)


def forget(root):
    for environment in Store(root).environments():
        Store(root).locks(environment.key).release()


def test_nodes_that_share_files_rebuild_once(here, fake_uv):
    for builds in (1, 2, 3):
        create_local_venv_on_each_node(SPEC, "x", OneByOne("a", "b", "c"), force_rebuild=True)
        assert len(fake_uv.calls("pip install")) == builds
        forget(here)


REBUILD = """
import sys
from raycrew.venv_manager import Store
store, (key, token) = Store(), sys.argv[1:]
recipe = store.recipe(key)
def report(text):
    print(text, flush=True)
store.install(key, lambda: recipe, python=recipe.python, force=True, token=token, report=report)
"""


@pytest.mark.parametrize("token", ["", "of-one-call"])
def test_rebuilds_at_the_same_time_build_once_and_all_succeed(here, fake_uv, token):
    key = ensure(SPEC).key
    forget(here)
    command = [sys.executable, "-c", REBUILD, key, token]
    with Store(here).locks(key).building(5.0):
        running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        assert all(one.stdout.readline().startswith(b"waiting") for one in running)
    for one in running:
        one.communicate()
    assert [one.returncode for one in running] == [0, 0, 0]
    assert len(fake_uv.calls("pip install")) == 2


def test_the_variable_rebuilds_once_in_a_process_for_all_its_workers(here, fake_uv, monkeypatch):
    monkeypatch.setenv("RAYCREW_FORCE_REBUILD_VENVS", "1")
    registry = ActorEnvironmentRegistry()
    registry.register("pkg.*", SPEC)
    provider = RegistryEnvironmentProvider(registry)
    for name, runner in (("One", None), ("Two", None), ("Three", ThreadNodes()), ("Four", ThreadNodes())):
        python = provider.python_for(f"pkg.{name}", runner)
        with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE):  # as a worker
            provider.python_for(f"pkg.{name}.Again", runner)
    assert prefetch(registry) == {"pkg.*": python}
    assert len(fake_uv.calls("pip install")) == 1
    assert len(fake_uv.calls("pip compile")) == 1


def test_the_variable_rebuilds_once_on_each_disk_also_after_the_driver_did(here, fake_uv, monkeypatch):
    create_local_venv_on_each_node(SPEC, "x", Apart("a"))
    monkeypatch.setenv("RAYCREW_FORCE_REBUILD_VENVS", "1")
    ensure(SPEC)
    assert len(fake_uv.calls("pip install")) == 2
    for _ in range(2):
        create_local_venv_on_each_node(SPEC, "x", Apart("a"))
        assert len(fake_uv.calls("pip install")) == 3
        ensure(SPEC)


def test_a_rebuild_by_the_variable_that_failed_is_tried_again(here, fake_uv, monkeypatch):
    ensure(SPEC)
    forget(here)
    monkeypatch.setenv("RAYCREW_FORCE_REBUILD_VENVS", "1")
    fake_uv.fail("pip compile", "error: broken")
    with pytest.raises(Exception, match="broken"):
        ensure(SPEC)
    fake_uv.fail("pip compile", "")
    ensure(SPEC)
    assert len(fake_uv.calls("pip install")) == 2


def test_nodes_keep_to_the_deadline_and_the_number_of_builds_of_the_drivers_store(here, fake_uv):
    class Told(ThreadNodes):
        def run_on_each_node(self, fn, *, timeout_s):
            self.deadline_s = timeout_s
            return super().run_on_each_node(fn)

    patient, store = Store(), Store(environ=dict(os.environ), build_timeout_s=1.0, max_builds=1)
    prepare(SPEC, patient)
    fake_uv.hold("pip install")
    nodes = Told(["a"])
    try:
        with pytest.raises(ProvisionError, match="did not end within 1 s"):
            create_local_venv_on_each_node(SPEC, "x", nodes, store=store)
    finally:
        fake_uv.release("pip install")
    assert 1.0 < nodes.deadline_s < 3600
    with (
        slot(store.root / "locks", 1, 1.0),
        pytest.raises(ProvisionError, match="1 other environments are being built"),
    ):
        create_local_venv_on_each_node(SPEC, "x", nodes, store=store)
    assert create_local_venv_on_each_node(SPEC, "x", nodes, store=patient)
