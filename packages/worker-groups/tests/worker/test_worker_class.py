import pickle
import sys
from typing import ClassVar

import pytest
import workers
from workers import AsyncWorker, Configured, Decorated, Grouped, Worker

from raycrew.worker_groups._worker.forwarders import shell_class
from raycrew.worker_groups._worker.shell import Shell
from raycrew.worker_groups._worker.worker_class import (
    describe,
    describe_class,
    fqn_of,
    held_class,
    import_class,
    load_class,
    source_of,
)


def test_a_class_is_described_without_its_values():
    info = describe_class(Worker, {})
    assert (info.fqn, info.name, info.is_async) == ("workers.Worker", "Worker", False)
    assert str(info.init) == "(base=None, *, scale=None)"
    assert str(info.methods["double"].signature) == str(info.methods["echo"].signature).replace(
        "*args, **kwargs", "x"
    )
    assert info.methods["count_to"].kind == "generator"
    assert "__init__" not in info.methods
    assert pickle.loads(pickle.dumps(info)).methods.keys() == info.methods.keys()


def test_kinds_of_methods():
    methods = describe_class(AsyncWorker, {}).methods
    assert {name: m.kind for name, m in methods.items()} == {
        "slowly": "async",
        "gather": "async",
        "forever": "async",
        "count_to": "async_generator",
        "rank": "sync",
    }
    assert describe_class(Grouped, {}).methods["side"].options == {"__ray_concurrency_group__": "side"}


def test_a_decorated_class_travels_by_name_and_brings_its_options():
    assert source_of(Decorated) == "workers.Decorated"
    info = describe(source_of(Decorated))
    assert (info.fqn, info.options["num_cpus"], info.options["max_concurrency"]) == (
        "workers.Decorated",
        0,
        2,
    )
    assert list(info.methods) == ["get_name"]


def test_a_class_without_a_name_travels_by_value():
    class Local:
        _default_options: ClassVar = {"num_cpus": 0}

    cls, options = load_class(source_of(Local))
    assert (cls.__name__, options) == ("Local", {})
    assert describe(source_of(Local)).options == {"num_cpus": 0}


def test_names_are_looked_up():
    assert import_class("workers.Worker") is Worker
    assert import_class("workers:Worker") is Worker
    assert held_class("workers.Worker") is Worker
    assert held_class("no_such_module.Far") is None
    assert fqn_of("workers:Worker") == fqn_of(Worker) == "workers.Worker"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("workers.Wroker", "has no 'Wroker'"),
        ("no_such_module.Far", "no module for"),
        ("Far", "no module for"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ImportError, match=message):
        import_class(name)


def test_a_module_that_fails_by_itself_is_not_taken_for_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_class("broken_module.Far")
    assert "broken_module" not in sys.modules


def test_what_is_no_class_is_refused():
    for worker in (42, workers, "Worker"):
        with pytest.raises(TypeError):
            fqn_of(worker)
    with pytest.raises(TypeError, match="is not a class"):
        load_class("workers.time")


def test_configure_worker_is_asked_what_it_takes():
    request = {"num_gpus": 1, "bundle_indices": (0, [0, 1]), "num_gpus_per_node": 8}
    first, second = describe_class(Configured, {}, [request, {**request, "bundle_indices": None}]).configured
    assert first.init_kwargs == {"told": (1, (0, [0, 1]), 8)}
    assert second.env_vars["LEADER"] == "None"

    class Short:
        @staticmethod
        def configure_worker(num_gpus, bundle_indices):
            return {"num_gpus": num_gpus}, None, None

    assert describe_class(Short, {}, [request]).configured[0].resources == {"num_gpus": 1}


def test_the_shell_has_the_methods_but_not_the_module():
    shell = shell_class(describe_class(Worker, {}))
    assert issubclass(shell, Shell)
    assert shell.__name__ == "Worker"
    assert {"add", "count_to", "double", "_hidden"} <= set(vars(shell))
    assert b"workers" not in pickle.dumps({k: str(v) for k, v in vars(shell).items() if k != "__doc__"})


def test_names_of_the_shell_are_reserved():
    class Clashing:
        def _raycrew_begin(self):
            """Would take the shell's place."""

    with pytest.raises(ValueError, match=r"\['_raycrew_begin'\]"):
        shell_class(describe_class(Clashing, {}))
