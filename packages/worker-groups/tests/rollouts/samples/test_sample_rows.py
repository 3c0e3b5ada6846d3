"""What rows are kept as, and for how long."""

import gc
import sys
import weakref
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest

from raycrew.worker_groups._health import observed
from raycrew.worker_groups.rollouts.samples import SampleQueue


@pytest.fixture
def queue():
    with SampleQueue(["tokens"]) as made:
        yield made


class View:
    """A tensor that is pickled with all that it is a view of, as those of torch are."""

    def __init__(self, data, begin, end):
        self.data, self.begin, self.end = data, begin, end

    nbytes = property(lambda self: self.end - self.begin)

    def untyped_storage(self):
        return SimpleNamespace(nbytes=lambda: len(self.data))

    def detach(self):
        return self

    def clone(self):
        return type(self)(self.data[self.begin : self.end], 0, self.nbytes)


def test_tensors_inside_of_rows_are_kept_without_what_they_are_views_of(queue, monkeypatch):
    module = ModuleType("like_torch")
    module.View = type("View", (View,), {"__module__": "like_torch"})
    monkeypatch.setitem(sys.modules, "like_torch", module)
    data = bytes(range(200)) * 500
    rows = [{"ids": module.View(data, i, i + 10), "more": [module.View(data, 0, 5)]} for i in range(20)]
    queue.put({"tokens": rows}, version=0)
    assert queue.stats().in_memory_bytes < 20_000
    for i, row in enumerate(queue.get(20)["tokens"]):
        assert row["ids"].data == data[i : i + 10] and row["more"][0].data == data[:5]


class Sparse:
    """A tensor without a storage of its own, as sparse ones of torch are."""

    def __init__(self, values):
        self.values = values

    def untyped_storage(self):
        raise NotImplementedError("Cannot access storage")

    def detach(self):
        return self

    def clone(self):
        return type(self)(list(self.values))


def test_tensors_without_a_storage_are_kept(queue, monkeypatch):
    module = ModuleType("like_torch")
    module.Sparse = type("Sparse", (Sparse,), {"__module__": "like_torch"})
    monkeypatch.setitem(sys.modules, "like_torch", module)
    queue.put({"tokens": [module.Sparse([1]), {"inside": module.Sparse([2])}]}, version=0)
    alone, inside = queue.get(2)["tokens"]
    assert (alone.values, inside["inside"].values) == ([1], [2])


def test_a_row_that_can_not_be_pickled_is_refused_with_its_column(queue):
    def local():
        pass

    for row in (local, lambda: 1, (x for x in "ab")):
        with pytest.raises(TypeError, match="a row of column 'tokens' can't be pickled: "):
            queue.put({"tokens": [1, row]}, version=0)
    assert queue.stats().in_memory_bytes == 0


class Handle(list):
    """Stands for rows that are elsewhere."""

    def select(self, rows):
        return Handle(self[i] for i in rows)

    def join_rows(self, others):
        return Handle(sum(others, self))


def test_a_queue_that_is_closed_holds_no_handles(queue):
    handle = Handle("ab")
    gone = weakref.ref(handle)
    queue.put({"tokens": handle}, version=0)
    queue.get(1)
    del handle
    gc.collect()
    assert gone() is not None
    queue.close()
    gc.collect()
    assert gone() is None


def test_an_observer_that_fails_does_not_have_a_put_look_undone(queue, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no metrics today")

    monkeypatch.setattr(observed, "by", SimpleNamespace(counted=fail, spanned=lambda span: None))
    assert queue.put({"tokens": [1]}, version=0) == [0]
    assert "no metrics today" in caplog.text


def test_what_an_earlier_process_has_told_of_is_not_counted_again(monkeypatch, tmp_path):
    counts = Counter()
    observer = SimpleNamespace(
        counted=lambda name, labels, n: counts.update({labels.get("what"): n}), spanned=lambda span: None
    )
    monkeypatch.setattr(observed, "by", observer)
    for _ in range(3):
        with SampleQueue(["tokens"], directory=tmp_path) as queue:
            queue.put({"tokens": [1]}, version=0)
            queue.get(1).done()
            stats = queue.stats()
    assert (counts["produced"], counts["consumed"]) == (stats.produced, stats.consumed) == (3, 3)


@pytest.mark.hostile
@pytest.mark.parametrize("kind", [set, frozenset])
def test_rows_in_no_order_are_refused(queue, kind):
    with pytest.raises(TypeError, match=f"a sequence of rows or a handle on them, not {kind.__name__}"):
        queue.put({"tokens": kind([1, 2])}, version=1)
    assert queue.stats().held == 0
