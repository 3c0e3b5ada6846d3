"""Copying into a bucket: by several threads, and folded block by block, as what is there in the end."""

import threading
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Model, assert_same

from raycrew.tensor_transport._bytes import FOLD_BYTES, SECTION_BYTES, fold_in_sections
from raycrew.tensor_transport.errors import SourceChangedError
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._publishing import copying, publisher
from raycrew.tensor_transport.weights._publishing.copying import STEP_BYTES, Copying, Filling
from raycrew.tensor_transport.weights._publishing.glimpses import fold
from raycrew.tensor_transport.weights._update import TensorEntry

STEP = STEP_BYTES // 8
LARGE = SECTION_BYTES + 3 * FOLD_BYTES + 24


def laid_out(tensors):
    """A bucket with anything in it, and the places of tensors there, as a publisher has them."""
    offsets = np.cumsum([0] + [-(-tensor.nbytes // 64) * 64 for tensor in tensors])
    bucket = torch.full((int(offsets[-1]),), 7, dtype=torch.uint8)
    heard, copies = {}, []
    for number, (tensor, offset) in enumerate(zip(tensors, offsets.tolist(), strict=False)):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        entry = TensorEntry(str(number), dtype, shape, 0, offset, tensor.nbytes)
        copies.append(Copying(tensor, entry, bucket, partial(heard.__setitem__, number)))
    return bucket, copies, heard


def check_copied(tensors, summed):
    bucket, copies, heard = laid_out(tensors)
    filling = Filling(bucket.numpy(), copies, summed=summed)
    filling.begin()
    filling.copy()
    found = filling.finish()
    assert found == (fold_in_sections(bucket) if summed else None)
    for number, (tensor, each) in enumerate(zip(tensors, copies, strict=True)):
        assert torch.equal(each.copy, tensor)
        assert heard[number] % 2**64 == int(fold(tensor)) % 2**64


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    st.sampled_from([torch.uint8, torch.bool, torch.bfloat16, torch.float64]),
    st.integers(0, 3),
)
def test_copies_and_their_folds_are_those_of_the_tensors(sizes, dtype, offset):
    held = torch.arange(4003).to(dtype)
    check_copied([held[offset : offset + size] for size in sizes], summed=True)


@pytest.mark.parametrize("summed", [False, True])
def test_large_tensors_are_copied_by_several_threads(monkeypatch, summed):
    whole = torch.randint(-(2**62), 2**62, (LARGE // 8,))
    threads, work = set(), copying.fold_bytes

    def noted(raw):
        threads.add(threading.get_ident())
        return work(raw)

    monkeypatch.setattr(copying, "fold_bytes", noted)
    check_copied([whole[:100], whole, whole[1:5], whole.view(torch.uint8)[5:1000]], summed)
    assert threads


def test_tensors_of_any_strides_are_copied():
    numbers = torch.randn(300, 40, dtype=torch.complex64)
    views = [numbers.T, numbers[::2, 3:], numbers.conj(), numbers.conj().imag, numbers[0, 0].expand(9, 9)]
    check_copied([*views, numbers, torch.tensor(3.0), torch.ones(1).as_strided((1,), (5,))], summed=True)


def test_what_was_copied_is_folded_before_the_next_block_is(monkeypatch):
    """While it is in the cache; and nobody reads the bucket once more for its checksum."""
    sizes, work = [], copying.fold_bytes

    def noted(raw):
        sizes.append(raw.nbytes)
        return work(raw)

    def none_left(_):
        raise AssertionError("the bucket is read once more")

    monkeypatch.setattr(copying, "fold_bytes", noted)
    monkeypatch.setattr(publisher, "checksum", none_left)
    held, model = {"a": torch.randn(LARGE // 8), "b": torch.randn(5)}, Model()
    with SharedMemoryTransport() as store, WeightPublisher(store) as publishing:
        update = publishing.publish(held)
        WeightReceiver(model.load, store=store).apply(update)
        assert_same(model.tensors, held)
    assert sum(sizes) == sum(tensor.nbytes for tensor in held.values())
    assert max(sizes) <= STEP_BYTES
    assert update.buckets[0].checksum is not None


@pytest.mark.hostile
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("place", [0, STEP - 1, STEP, 3 * STEP - 1, 3 * STEP, LARGE // 16, LARGE // 8 - 1])
def test_a_write_while_steps_are_copied_is_seen_or_published(monkeypatch, place, threads, checksums):
    """What was copied before is refused; what comes later is the state that is there in the end."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(threads))
    held, work, blocks = {"a": torch.zeros(LARGE // 8, dtype=torch.int64)}, copying.fold_bytes, count(1)

    def intrude(raw):
        found = work(raw)
        if next(blocks) == 3:
            held["a"].numpy()[place] = 5
        return found

    with SharedMemoryTransport() as store, WeightPublisher(store, checksums=checksums) as publishing:
        monkeypatch.setattr(copying, "fold_bytes", intrude)
        try:
            update = publishing.publish(held)
        except SourceChangedError:
            assert place < 3 * STEP or threads > 1
            update = publishing.publish(held)
        else:
            assert place >= 3 * STEP or threads > 1, "one thread copies what comes first at first"
        model = Model()
        WeightReceiver(model.load, store=store).apply(update)
        assert_same(model.tensors, held)


@pytest.mark.hostile
def test_a_thread_that_goes_on_writing_is_seen():
    held, stop = {f"w{i}": torch.zeros(LARGE // 8, dtype=torch.int64) for i in range(3)}, threading.Event()
    arrays, begun = [tensor.numpy() for tensor in held.values()], threading.Event()

    def train():
        step = 0
        while not stop.is_set():
            step += 1
            for array in arrays:
                array += step
            begun.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        with SharedMemoryTransport() as store, WeightPublisher(store, checksums=False) as publishing:
            assert begun.wait(60)
            with pytest.raises(SourceChangedError):
                for _ in range(1000):
                    publishing.publish(held)
            stop.set()
            trainer.join()
            model = Model()
            WeightReceiver(model.load, store=store).apply(publishing.publish(held))
            assert_same(model.tensors, held)
    finally:
        stop.set()
        trainer.join()


SMALL = ["uint1", "uint4", "int4", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bool"]


@pytest.mark.parametrize("name", [name for name in SMALL if hasattr(torch, name)])
@pytest.mark.parametrize("how", ["held", "turned", "streamed", "transformed"])
def test_bytes_of_any_dtype_are_published(name, how):
    dtype, found = getattr(torch, name), {}
    values = torch.arange(24, dtype=torch.uint8).remainder(2).reshape(4, 6)
    tensor = values.view(dtype).t() if how == "turned" else values.view(dtype)
    options = {"transform": lambda _, given: given} if how == "transformed" else {}
    with SharedMemoryTransport() as store, WeightPublisher(store, **options) as publishing:
        held = {"a": tensor}
        update = publishing.publish(iter(held.items()) if how == "streamed" else held)
        WeightReceiver(found.update, store=store).apply(update)
    assert found["a"].dtype == dtype
    assert found["a"].view(torch.uint8).equal(tensor.view(torch.uint8))
