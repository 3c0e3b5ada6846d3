"""Whoever observes may leave at any moment, and is in nobody's way."""

import ast
from pathlib import Path

import pytest

import raycrew.worker_groups
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import timeline
from raycrew.worker_groups._health.observers import observed
from raycrew.worker_groups.testing import InProcessGroup

SOURCES = sorted(Path(raycrew.worker_groups.__file__).parent.rglob("*.py"))


class Adder:
    def add(self, a, b=1):
        return a + b


class Interrupted:
    """An observer that fails when it looks, and takes in everything else."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        return lambda *told: None

    def look(self, timeout_s):
        raise self.error


def reads_of_the_observer(function):
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) == "observed.by"
        and isinstance(node.ctx, ast.Load)
    ]


def test_who_observes_is_read_once_by_each_function_as_another_thread_may_end_it():
    functions = [
        (path.name, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    often = [(name, f.name) for name, f in functions if len(reads_of_the_observer(f)) > 1]
    assert often == []


@pytest.mark.hostile
@pytest.mark.parametrize("force", [False, True])
def test_workers_end_though_the_last_look_at_them_is_interrupted(monkeypatch, force):
    cluster = FakeCluster([2])
    group = InProcessGroup(cluster, Adder)
    monkeypatch.setattr(observed, "by", Interrupted(KeyboardInterrupt()))
    if force:
        assert group.shutdown(force=True), "it does not look"
    else:
        with pytest.raises(KeyboardInterrupt):
            group.shutdown()
    monkeypatch.undo()
    with InProcessGroup(cluster, Adder) as other:
        assert other.call("add", 1).get_results() == [2, 2]
    assert not group.unended


@pytest.mark.hostile
def test_a_look_that_fails_is_logged_and_the_shutdown_is_a_good_one(monkeypatch, caplog):
    group = InProcessGroup(FakeCluster([2]), Adder)
    monkeypatch.setattr(observed, "by", Interrupted(ValueError("odd")))
    assert group.shutdown()
    assert "odd" in caplog.text


def test_the_last_look_takes_no_longer_than_the_shutdown_may(monkeypatch):
    asked = []
    with timeline() as run:
        group = InProcessGroup(FakeCluster([2]), Adder)
        monkeypatch.setattr(observed.by, "look", asked.append)
        group.shutdown(timeout=0.5)
        monkeypatch.undo()
    assert len(asked) == 1
    assert 0 < asked[0] <= 0.5
    assert run.dropped == 0
