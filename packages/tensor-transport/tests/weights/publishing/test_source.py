"""What is published is one state of the tensors that were named, or nothing."""

import os
import threading
from collections.abc import Mapping

import pytest
import torch
from forking import in_a_child
from hypothesis import given
from hypothesis import strategies as st
from models import Model, assert_same, weights
from torch.utils._python_dispatch import TorchDispatchMode

from raycrew.tensor_transport.errors import SourceChangedError, TransportError, UnsupportedTensorError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    gather_weights,
)
from raycrew.tensor_transport.weights._publishing.glimpses import Glimpse, Held, changed, fold
from raycrew.tensor_transport.weights._publishing.source import SourceWatch, find_ties

pytestmark = pytest.mark.hostile


class Intruder(InProcessByteStore):
    """A store that lets somebody act while a bucket is put."""

    def __init__(self, act, at=1):
        super().__init__()
        self.act, self.at, self.puts = act, at, 0

    def put(self, data):
        self.puts += 1
        if self.puts == self.at:
            self.act()
        return super().put(data)


class MadeOnAccess(Mapping):
    """Makes each tensor when it is looked up; freed memory is used again at once."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return (f"w{i}" for i in range(self.count))

    def __getitem__(self, name):
        return torch.full((1000,), float(name[1:]))


def parameters(count=8, requires_grad=True):
    return {f"w{i}": torch.nn.Parameter(torch.full((64,), float(i)), requires_grad) for i in range(count)}


def arrived(update, store):
    model = Model()
    WeightReceiver(model.load, store=store).apply(update)
    return model.tensors


def fused_step(held):
    optimizer = torch.optim.AdamW(held.values(), lr=0.1, fused=True)
    for parameter in held.values():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def through_data(held):
    return lambda: held["w0"].data.add_(1)


def through_numpy(held):
    return lambda: held["w0"].detach().numpy().__iadd__(1)


def a_counted_write_that_sums_to_the_same(held):
    """Two elements at a time are summed up: pairs of them change places."""
    before, after = torch.arange(64.0), torch.arange(64.0).roll(2)
    assert fold(before) == fold(after)

    def turn():
        with torch.no_grad():
            held["w0"].copy_(after)

    with torch.no_grad():
        held["w0"].copy_(before)
    return turn


WRITERS = [fused_step, through_data, through_numpy, a_counted_write_that_sums_to_the_same]
FORMS = {
    "mapping": lambda held: held,
    "items": lambda held: held.items(),
    "pairs": lambda held: list(held.items()),
    "detached": lambda held: {name: parameter.detach() for name, parameter in held.items()},
    "iterator of parameters": lambda held: iter(held.items()),
    "generator of detached tensors": lambda held: ((name, p.detach()) for name, p in held.items()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_between_two_buckets_is_refused(writer, form):
    held = parameters()
    store = Intruder(writer(held), at=5)
    publisher = WeightPublisher(store, bucket_bytes=256)
    with pytest.raises(SourceChangedError, match="'w0'") as caught:
        publisher.publish(FORMS[form](held))
    assert "w0" in caught.value.names
    assert "w7" not in caught.value.names
    assert not store.held and publisher.latest is None
    update = publisher.publish(held)
    assert update.version == 1
    assert_same(arrived(update, store), {name: p.detach() for name, p in held.items()})


def test_a_write_to_an_inference_tensor_is_refused():
    with torch.inference_mode():
        held = {f"w{i}": torch.full((64,), float(i)) for i in range(4)}

    def write():
        with torch.inference_mode():
            held["w0"].add_(1)

    store = Intruder(write, at=3)
    with pytest.raises(SourceChangedError, match=r"1 of the tensors .* 'w0'"):
        WeightPublisher(store, bucket_bytes=256).publish(held)
    assert_same(arrived(WeightPublisher(store).publish(held), store), held)


def test_many_names_are_shortened():
    held = parameters(8)
    store = Intruder(fused_step(held), at=8)
    with pytest.raises(SourceChangedError, match=r"'w0', 'w1', 'w2', 'w3', 'w4' and 3 more; nothing was"):
        WeightPublisher(store, bucket_bytes=256).publish(held)


def test_training_in_another_thread_is_refused():
    held = parameters(40)
    step, stop = fused_step(held), threading.Event()

    def train():
        while not stop.is_set():
            step()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        with (
            WeightPublisher(InProcessByteStore(), bucket_bytes=256) as publisher,
            pytest.raises(SourceChangedError, match="written to while they were published"),
        ):
            for _ in range(1000):
                publisher.publish(held)
    finally:
        stop.set()
        trainer.join()


def test_a_part_of_one_tensor_that_is_written_during_its_copy_is_seen(monkeypatch):
    source = torch.zeros(100)

    def pairs():
        yield "late", source

    copy_ = torch.Tensor.copy_

    def torn(self, other, *args):
        copy_(self, other, *args)
        source.numpy()[3] = 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", torn)
    with pytest.raises(SourceChangedError, match="'late'"):
        WeightPublisher(InProcessByteStore()).publish(pairs())


def test_tensors_made_on_access_are_told_apart():
    store = InProcessByteStore()
    update = WeightPublisher(store).publish(MadeOnAccess(8))
    assert update.size_bytes >= 8 * 4000
    assert_same(arrived(update, store), dict(MadeOnAccess(8)))


def test_views_that_differ_in_any_way_are_no_ties():
    base = torch.arange(12.0)
    same = {
        "base": base,
        "again": base.view(12),
        "offset": base[1:],
        "shorter": base[:11],
        "shape": base.view(3, 4),
        "stride": base.view(3, 4).T.contiguous().T,
        "dtype": base.view(torch.int32),
    }
    assert find_ties(same.items()) == {"again": "base"}
    values = torch.tensor([1 + 2j])
    assert find_ties({"a": values, "conj": values.conj()}.items()) == {}
    store = InProcessByteStore()
    update = WeightPublisher(store).publish({"a": values, "conj": values.conj(), "neg": values.conj().imag})
    found = arrived(update, store)
    assert found["a"].item() == 1 + 2j and found["conj"].item() == 1 - 2j and found["neg"].item() == -2


class Wrapper(torch.Tensor):
    """Its own memory is none: what it holds lies in an attribute."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        found = func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))
        return Wrapper(found) if isinstance(found, torch.Tensor) else found


class Named(torch.nn.Parameter):
    """A subclass with memory as any tensor has it."""


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (lambda: Wrapper(torch.ones(3)), "wrapping"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (torch.nn.parameter.UninitializedParameter, "lazy"),
        (torch.nn.parameter.UninitializedBuffer, "lazy"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_whose_memory_says_nothing_are_refused_by_name(bad, kind):
    publisher = WeightPublisher(InProcessByteStore())
    for weights_of in (dict, iter):
        with pytest.raises(UnsupportedTensorError, match=f"'x' is a {kind}"):
            publisher.publish(weights_of([("x", bad()), ("y", bad())]))


@pytest.mark.hostile
@pytest.mark.parametrize("size_bytes", [0, 396])
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(size_bytes):
    """Torch itself reads on, in other memory."""
    publisher, whole = WeightPublisher(InProcessByteStore()), torch.ones(100)
    views = [whole, torch.nn.Parameter(whole), whole[1:].view(3, 33).T, whole[:99:98], whole[99]]
    there = [whole[:0], whole[:99], whole[98]]
    whole.untyped_storage().resize_(size_bytes)
    for bad in [view for view in views if size_bytes == 0 or view.shape != (2,)]:
        for weights_of in (dict, iter):
            with pytest.raises(UnsupportedTensorError, match="'x': its memory was freed"):
                publisher.publish(weights_of([("w", torch.ones(3)), ("x", bad)]))
    if size_bytes:
        assert len(publisher.publish(dict(zip("abc", there, strict=True))).schema) == 3


@pytest.mark.hostile
def test_a_tensor_whose_memory_is_freed_after_its_copy_is_seen():
    tensor, kept = torch.ones(64), torch.ones(3)
    seen = [Glimpse("w", Held(one), one._version, fold(one)) for one in (tensor, kept)]
    tensor.untyped_storage().resize_(0)
    assert changed(seen) == seen[:1]


def test_a_plain_subclass_is_published():
    store = InProcessByteStore()
    update = WeightPublisher(store).publish({"a": Named(torch.ones(3)), "b": Named(torch.zeros(3))})
    assert_same(arrived(update, store), {"a": torch.ones(3), "b": torch.zeros(3)})


@given(st.integers(0, 40), st.integers(0, 9), st.sampled_from([torch.uint8, torch.bfloat16, torch.int64]))
def test_fold_is_that_of_the_elements_wherever_they_lie(size, offset, dtype):
    held = torch.arange(64).to(dtype)
    part = held[offset : offset + size]
    assert fold(part).item() == fold(part.clone()).item()
    strided = torch.stack([held, held], 1)[:, 0][offset : offset + size]
    assert fold(strided).item() == fold(part).item()
    if size:
        changed = part.clone()
        changed[size // 2] += 1
        assert fold(changed).item() != fold(part).item()


def test_threads_take_turns():
    store = InProcessByteStore()
    publisher = WeightPublisher(store, bucket_bytes=256)
    inside, go_on, found = threading.Event(), threading.Event(), []

    def slow():
        yield "seed", torch.zeros(100)
        inside.set()
        go_on.wait(60)
        yield "more", torch.zeros(100)

    def publish(source, version):
        try:
            found.append(publisher.publish(source, version=version).version)
        except ValueError as error:
            found.append(str(error))

    first = threading.Thread(target=publish, args=(slow(), 2))
    first.start()
    inside.wait(60)
    second = threading.Thread(target=publish, args=({"seed": torch.ones(100)}, 2))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert found == [2, "version must be above the last one, 2, got 2"]
    assert set(arrived(publisher.latest, store)) == {"seed", "more"}


def test_many_threads_publish_different_versions_of_one_state_each():
    store, updates = InProcessByteStore(), []
    publisher = WeightPublisher(store, bucket_bytes=128)
    state = {seed: {f"w{i}": torch.full((40,), float(seed)) for i in range(20)} for seed in range(4)}
    kept = store.release
    store.release = lambda ticket: None
    threads = [
        threading.Thread(target=lambda s=s: updates.extend(publisher.publish(state[s]) for _ in range(5)))
        for s in state
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.release = kept
    assert sorted(u.version for u in updates) == list(range(1, 21))
    for update in updates:
        assert len({float(t[0]) for t in arrived(update, store).values()}) == 1


def test_a_publication_within_a_publication_is_refused():
    publisher = WeightPublisher(InProcessByteStore())

    def recursive():
        yield "a", torch.ones(1)
        publisher.publish({"b": torch.ones(1)})

    with pytest.raises(TransportError, match="by the iterator that it takes its weights from"):
        publisher.publish(recursive())
    assert publisher.publish(weights()).version == 1


def test_a_forked_publisher_does_not_publish_under_the_same_name(monkeypatch):
    publisher = WeightPublisher(InProcessByteStore())
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(TransportError, match=f"that of process {pid}; after a fork"):
        publisher.publish(weights())


class Outside(InProcessByteStore):
    """A store outside of its processes: a child that releases bytes takes them from its parent."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def release(self, ticket):
        self.path.write_text(f"released by {os.getpid()}")


def test_a_forked_child_takes_nothing_from_a_publisher_or_receiver_that_it_closes(tmp_path):
    released, directory = tmp_path / "released", WeightDirectory.local()
    publisher = WeightPublisher(Outside(released), keep=2)
    receiver = WeightReceiver(lambda _: None, directory=directory, name="generator")
    publisher.publish(weights())
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go_on.wait(60)
        yield "a", torch.ones(1)

    def let_go():
        publisher.release()
        with publisher, receiver:
            return True

    publishing = threading.Thread(target=lambda: publisher.publish(slow()))
    publishing.start()
    assert begun.wait(60)
    is_well = in_a_child(let_go)  # Another thread holds the lock of the publisher meanwhile.
    go_on.set()
    publishing.join(60)
    assert is_well and not released.exists()
    assert publisher.publish(weights()).version == 3 and released.exists()
    receiver.close()


def test_gathering_names_what_is_no_tensor():
    with pytest.raises(UnsupportedTensorError, match="'a' is a int"):
        list(gather_weights({"a": 3}))


@pytest.mark.parametrize("changes", [False, True])
def test_tensors_are_looked_at_again_while_the_last_bucket_is_sent(monkeypatch, changes):
    """If they changed, that bucket does not stay either."""
    held, looked, check = parameters(2, requires_grad=False), threading.Event(), SourceWatch.check
    sending = threading.Event()

    def look(watch, **how):
        assert sending.wait(60), "it is looked at once the last bucket is on its way"
        try:
            check(watch, **how)
        finally:
            looked.set()

    class Slow(Intruder):
        def put(self, data):
            if self.puts:
                sending.set()
                assert looked.wait(60), "nobody looks before the last bucket is sent"
            return super().put(data)

    monkeypatch.setattr(SourceWatch, "check", look)
    store = Slow(lambda: held["w0"].add_(1) if changes else None)
    publisher = WeightPublisher(store, directory=WeightDirectory.local(), bucket_bytes=256)
    if changes:
        with pytest.raises(SourceChangedError, match="'w0'"):
            publisher.publish(held)
    else:
        assert len(publisher.publish(held).buckets) == 2
    assert (store.puts, len(store.held)) == (2, 0 if changes else 2)


class Sums(TorchDispatchMode):
    """Counts sums."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.sum.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 2), (7, 2), (8, 1), (16, 1), (17, 2)])
def test_whole_words_are_summed_up_at_once(size, count):
    tensor = torch.arange(1, size + 1, dtype=torch.uint8)
    with Sums() as sums:
        found = int(fold(tensor))
    assert sums.count == count
    raw, whole = tensor.numpy().tobytes(), size // 8 * 8
    words = [int.from_bytes(raw[start : start + 8], "little") for start in range(0, whole, 8)]
    assert found % 2**64 == (sum(words) + sum(raw[whole:])) % 2**64
