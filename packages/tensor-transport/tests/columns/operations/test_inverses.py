"""Whatever has an inverse is undone by it, bit by bit, for any batch."""

import itertools
import json
import pickle

import numpy as np
import torch
from batches import assert_same, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycrew.tensor_transport import (
    BatchedDataDict,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    localize,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend

DTYPES = [torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.complex64]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def values(draw, *shape):
    """Any bits that the dtype has: NaN, negative zeros."""
    dtype = draw(st.sampled_from(DTYPES))
    count = int(np.prod(shape))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


@st.composite
def packed(draw, rows):
    dtype = draw(st.sampled_from(DTYPES))
    row = st.none() | st.lists(st.integers(0, 2).map(lambda n: torch.ones(n, 2).to(dtype)), max_size=3)
    return PackedTensor(draw(st.lists(row, min_size=rows, max_size=rows)))


@st.composite
def columns(draw, rows):
    lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return draw(
        st.sampled_from(
            [
                lambda: values(draw, rows, draw(st.integers(0, 2))),
                lambda: values(draw, draw(st.integers(0, 2)), rows).T,
                lambda: RaggedTensor(values(draw, sum(lengths), 2), lengths),
                lambda: draw(packed(rows)),
                lambda: draw(st.lists(PLAIN, min_size=rows, max_size=rows)),
                lambda: np.array([f"row {n}" for n in lengths], dtype="<U8"),
                lambda: np.array(lengths, dtype=draw(st.sampled_from(["<f2", ">i4", "M8[s]", "?"]))),
            ]
        )
    )()


@st.composite
def batches(draw, least=0):
    rows = draw(st.integers(least, 5))
    names = draw(st.lists(st.text(max_size=4), unique=True, max_size=3))
    metadata = draw(st.dictionaries(st.text(max_size=4), PLAIN, max_size=2))
    return BatchedDataDict({name: draw(columns(rows)) for name in names}, metadata=metadata)


every = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@every
@given(batches(), st.randoms(use_true_random=False))
def test_orders(batch, random):
    order = random.sample(range(batch.size), batch.size)
    assert_same(batch.apply_order(order).undo_order(order), batch)
    assert_same(batch.undo_order(order).apply_order(order), batch)
    assert_same(batch.apply_order(order).reorder_data(order), batch)


@every
@given(batches(), st.integers(1, 7), st.integers(1, 4))
def test_padding_to_a_multiple(batch, divisor, again):
    padded, added = batch.pad_to_divisor(divisor)
    assert padded.size % divisor == 0 and padded.padding_rows == added < divisor
    assert_same(padded.unpad(), batch)
    assert_same(padded.pad_to_divisor(again)[0].unpad(), batch)


@every
@given(batches(), st.integers(1, 4), st.data())
def test_parts(batch, count, data):
    assert_same(BatchedDataDict.concat(batch.shard(count)), batch)
    shards, order = batch.shard_by_batch_size(count, allow_uneven_shards=True)
    assert_same(BatchedDataDict.concat(shards).undo_order(order), batch)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=batch.size, max_size=batch.size)), dtype=bool)
    both = BatchedDataDict.concat([batch[mask], batch[~mask]])
    assert_same(both.undo_order(np.concatenate([np.flatnonzero(mask), np.flatnonzero(~mask)])), batch)


@every
@given(batches(), st.data())
def test_names_and_columns(batch, data):
    names = list(batch)
    new = dict(zip(names, data.draw(st.permutations(names)), strict=True))
    assert_same(batch.rename(new).rename({new: old for old, new in new.items()}), batch)
    taken = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    rest = batch.copy()
    assert_same(rest.pop(taken).union(rest).select(names), batch)


@every
@given(batches(), st.integers(0, 3))
def test_repeats(batch, times):
    for share in (False, True, list(batch)):
        repeated = batch.repeat_interleave(times, share=share)
        assert repeated.size == batch.size * times
        if times:
            assert_same(repeated[::times], batch)


@every
@given(batches())
def test_files_frames_and_handles(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("batches") / "batch"
    batch.save(path)
    assert_same(BatchedDataDict.load(path), batch)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
    encoded = batch.encode()
    assert_same(BatchedDataDict.decode(encoded.header, encoded.buffers, allow_pickle=True), batch)
    registry = ShardRegistry(InProcessBackend())
    assert_same(localize(remotize(batch, registry), registry), batch)
    assert batch == BatchedDataDict.load(path)


@every
@given(st.lists(st.booleans(), max_size=4), st.sampled_from([torch.uint8, torch.int8, torch.bfloat16]))
def test_casts_that_hold_every_value(truths, dtype):
    narrow = BatchedDataDict(x=torch.tensor(truths, dtype=torch.bool).to(dtype))
    for wide in (torch.int64, torch.float64, torch.complex64):
        back = narrow.cast({"x": wide}).cast({"x": torch.float64 if wide.is_complex else dtype}, lossy=True)
        assert same(back.cast({"x": dtype})["x"], narrow["x"])


@every
@given(batches(least=1), st.integers(1, 3), st.booleans(), st.integers(0, 5), st.integers(0, 5))
def test_a_pass_that_is_taken_up_has_every_row_once(batch, batch_size, shuffle, seed, stop):
    def iterator():
        numbered = (
            batch.union({"\0row": list(range(batch.size))}) if len(batch) else BatchedDataDict({"\0row": [0]})
        )
        return numbered.make_iterator(batch_size, shuffle=shuffle, seed=seed)

    first, rest = iterator(), iterator()
    begun = list(itertools.islice(first, stop))
    rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rows = [row for part in [*begun, *rest] for row in part["\0row"]]
    assert sorted(rows) == list(range(max(batch.size, 1)))
