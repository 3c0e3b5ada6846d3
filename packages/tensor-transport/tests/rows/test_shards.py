"""What stored rows say of themselves: sizes, columns, and whether they make one tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import InlineBackend, TensorShardInfo
from raycrew.tensor_transport._rows import ShardRead, StoreStats, Window, total
from raycrew.tensor_transport._rows.shards import check_alike

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def shard(shape, dtype="int16", **more):
    return TensorShardInfo("inline", "s", "", "", dtype, shape, **more)


@given(SHAPES, st.sampled_from(["int16", "bfloat16", "float64"]))
def test_a_shard_is_as_large_as_its_tensor(shape, dtype):
    tensor, info = torch.zeros(shape, dtype=getattr(torch, dtype)), shard(shape, dtype)
    assert info.size_bytes == tensor.nbytes
    assert info.torch_dtype == tensor.dtype
    assert info.rows == (len(tensor) if shape else 1)
    assert info.columns == (0, shape[1] if len(shape) > 1 else 0)
    assert ShardRead(info).is_whole and ShardRead(info).size_bytes == tensor.nbytes


@given(SHAPES.filter(bool), st.data())
def test_what_is_read_is_as_large_as_what_comes_of_it(shape, data):
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
    some = st.lists(st.integers(0, max(0, shape[0] - 1)), max_size=5 if shape[0] else 0)
    rows = data.draw(st.none() | st.slices(shape[0]).filter(_forwards) | some.map(_numbers))
    columns = data.draw(st.none() | _windows(shape[1])) if len(shape) > 1 else None
    read = ShardRead(shard(shape), rows, columns)
    part = read.of(tensor)
    assert read.shape == tuple(part.shape) and read.size_bytes == part.nbytes
    assert read.is_whole == (rows is None and columns is None)
    wanted = tensor.numpy() if columns is None else tensor.numpy()[:, slice(*columns)]
    assert part.tolist() == (wanted if rows is None else wanted[rows]).tolist()


def _forwards(rows):
    return (rows.step or 1) > 0


def _numbers(rows):
    return np.array(rows, dtype=np.int64)


def _windows(width):
    return st.tuples(st.integers(0, width), st.integers(0, width)).map(sorted).map(tuple)


def test_columns_are_counted_as_before_trimming():
    trimmed = shard((2, 3), column_offset=4, width=10, pad_value=0)
    assert trimmed.columns == (4, 7) and trimmed.full_width == 10
    assert shard((2, 3)).full_width == 3
    assert Window.of([trimmed, shard((1, 2), column_offset=1, width=10)]) == (1, 7, 10)
    assert Window.of([shard((2, 3)), shard((5, 3))]) == (0, 3, 3)
    assert Window.of([shard((2, 3)), shard((5, 2), width=3)]) == (0, 3, 3)


@pytest.mark.parametrize("shape", [(3,), (3, 4, 6), (3, 4, 5, 1)])
def test_rows_of_other_shapes_do_not_join(shape):
    check_alike([shard((3, 4, 5)), shard((7, 4, 5))])
    with pytest.raises(ValueError, match="does not join"):
        check_alike([shard((3, 4, 5)), shard(shape)])
    with pytest.raises(ValueError, match="does not join"):
        check_alike([shard(shape), shard((3, 4, 5))])


def test_what_makes_no_one_tensor_is_refused():
    with pytest.raises(ValueError, match="does not join"):
        check_alike([shard((3,)), shard((3, 4))])
    with pytest.raises(ValueError, match="does not join"):
        check_alike([shard((3, 4)), shard((3,))])
    with pytest.raises(ValueError, match="does not join"):
        check_alike([shard((3,)), shard((3,), "int32")])
    with pytest.raises(ValueError, match="does not join"):
        check_alike([shard((3,), "int32"), shard((3,))])
    with pytest.raises(ValueError, match="without dimensions have no rows"):
        check_alike([shard(()), shard(())])
    check_alike([shard(())])
    with pytest.raises(ValueError, match="of 3 and 4 columns do not make one tensor"):
        Window.of([shard((2, 3)), shard((2, 4))])
    with pytest.raises(ValueError, match="at least one shard"):
        Window.of([])


def test_stores_are_summed_and_the_earliest_step_of_any_is_told():
    one = StoreStats(shards=2, held_bytes=10, put_shards=5, oldest_step=7, leases=1)
    other = StoreStats(shards=1, peak_bytes=4, reserved_bytes=3, released_shards=2, oldest_step=4)
    assert total([one, other, StoreStats()]) == StoreStats(3, 10, 4, 3, 5, 2, 4, 1)
    assert total([]) == StoreStats() and total([StoreStats()]).oldest_step is None


def test_a_backend_whose_bytes_go_with_their_handles_holds_nothing():
    backend = InlineBackend()
    backend.put([torch.zeros(3)])
    found = backend.stats()
    assert (found.put_shards, found.shards, found.held_bytes, found.leases) == (1, 0, 0, 0)
    assert (found.peak_bytes, found.reserved_bytes, found.released_shards) == (0, 0, 0)
