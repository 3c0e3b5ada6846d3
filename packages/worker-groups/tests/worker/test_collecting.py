import gc
import sys
import weakref
from types import ModuleType

import pytest

from raycrew.worker_groups import heavy_imports
from raycrew.worker_groups._worker.collecting import collect_at_last


@pytest.fixture(autouse=True)
def collector():
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.fixture
def new_module(monkeypatch):
    def add():
        monkeypatch.setitem(sys.modules, "a_module_of_this_test", ModuleType("a_module_of_this_test"))

    return add


class Cycle:
    def __init__(self):
        self.itself = self


def test_nothing_is_collected_while_modules_are_imported_nor_looked_at_afterwards(new_module):
    before, runs = gc.get_threshold(), gc.get_stats()
    with heavy_imports():
        begun = gc.get_stats()[0]["collections"]
        kept = [Cycle() for _ in range(100_000)]
        new_module()
        assert gc.get_stats()[0]["collections"] == begun
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() > len(kept)
    assert gc.get_stats()[2]["collections"] == runs[2]["collections"] + 1


def test_what_is_garbage_before_does_not_stay(new_module):
    garbage = weakref.ref(Cycle())
    with heavy_imports():
        new_module()
    assert garbage() is None


def test_where_nothing_was_imported_everything_is_collected_as_ever():
    frozen = gc.get_freeze_count()
    with heavy_imports():
        garbage = weakref.ref(Cycle())
    assert gc.get_freeze_count() == frozen
    gc.collect()
    assert garbage() is None


def test_the_collector_goes_on_after_an_import_that_fails():
    before = gc.get_threshold()
    with pytest.raises(ImportError), heavy_imports():
        raise ImportError
    assert gc.get_threshold() == before


def test_what_an_imported_module_wants_of_the_collector_stays():
    with heavy_imports():
        gc.set_threshold(123, 4, 5)
        gc.disable()
    try:
        assert (gc.get_threshold(), gc.isenabled()) == ((123, 4, 5), False)
    finally:
        gc.enable()


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0)
    with heavy_imports():
        pass
    assert gc.get_threshold()[0] == 0


def test_finalizers_run_at_last_and_the_rest_is_left():
    garbage = weakref.ref(Cycle())
    collect_at_last()
    assert garbage() is None
    assert gc.get_freeze_count() > 0
