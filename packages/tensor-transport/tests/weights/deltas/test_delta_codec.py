"""Changes of runs of bytes: exact to the bit, small where little changed, refused where damaged."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycrew.tensor_transport.errors import DamagedBytesError, DecodeError
from raycrew.tensor_transport.weights.deltas import Delta, _codec, encode_delta
from raycrew.tensor_transport.weights.deltas._packed import NO_VERSION


def changed(old, share, random):
    new = old.copy()
    where = random.random(len(old)) < share
    new[where] ^= random.integers(1, 255, where.sum(), dtype=np.uint8)
    return new


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 3000),
    st.sampled_from([0, 0.0005, 0.01, 0.1, 0.4, 1]),
    st.sampled_from([7, 64, 300, 1 << 20]),
    st.integers(0, 2**32),
)
def test_changes_make_the_old_the_new(itemsize, count, share, block, seed):
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, itemsize * count, dtype=np.uint8)
    new = changed(old, share, random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_codec, "BLOCK", block)
        delta = Delta.unpacked(encode_delta(old, new, itemsize, version=2, base=1).packed())
        memory = old.copy()
        undo = delta.apply(memory)
        assert np.array_equal(memory, new)
        undo.apply(memory, verify=False)
        assert np.array_equal(memory, old)
        blocks = -(-itemsize // 8) * count // block + 1
        assert delta.size_bytes <= new.nbytes + 12 * blocks + 64, "never much more than all of it"
        whole = Delta.unpacked(encode_delta(None, new, itemsize).packed())
        memory = random.integers(0, 256, len(new), dtype=np.uint8)
        whole.apply(memory)
        assert np.array_equal(memory, new) and not whole.changes.needs_base


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32]
)
def test_one_changed_value_in_a_hundred_takes_a_tenth_at_most(dtype):
    random = np.random.default_rng(0)
    old = random.integers(0, 256, dtype.itemsize << 21, dtype=np.uint8)
    new = old.copy().reshape(-1, dtype.itemsize)
    new[random.permutation(len(new))[: len(new) // 100]] ^= 1
    assert encode_delta(old, new.reshape(-1), dtype.itemsize).size_bytes <= 0.1 * old.nbytes


def test_every_bit_counts():
    """-0.0 is no 0.0, and NaNs differ by their payload."""
    old = torch.tensor([0.0, float("nan"), float("nan"), 1.0]).view(torch.int32)
    new = old.clone()
    new[0], new[1] = -(2**31), old[1] + 5
    delta = encode_delta(old.view(torch.uint8).numpy(), new.view(torch.uint8).numpy(), 4)
    assert delta.changes.table["count"].tolist() == [2]
    delta.apply(old.view(torch.uint8).numpy())
    assert torch.equal(old, new)


@pytest.mark.hostile
def test_a_receiver_that_holds_something_else_is_found_and_left_alone():
    random = np.random.default_rng(1)
    old = random.integers(0, 256, 4000, dtype=np.uint8)
    delta = encode_delta(old, changed(old, 0.01, random), 2)
    other = old.copy()
    other[1234] ^= 8
    before = other.copy()
    with pytest.raises(DamagedBytesError, match="send it a full update"):
        delta.apply(other)
    assert np.array_equal(other, before)
    with pytest.raises(DecodeError, match="can't be applied to 3998"):
        delta.apply(old[:3998])
    with pytest.raises(DecodeError, match="can't be applied to 4002"):
        delta.apply(np.concatenate([old, old[:2]]))
    new = old.copy()
    new[1] ^= 1
    for place in range(
        2, 4000, 400
    ):  # The fold of some is above the one that is wanted, that of others below.
        other = old.copy()
        other[place] ^= 1
        before = other.copy()
        with pytest.raises(DamagedBytesError):
            encode_delta(old, new, 2).apply(other)
        assert np.array_equal(other, before)


@pytest.mark.hostile
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_damaged_deltas_never_write_wrong_values(seed):
    """Cut, or with a changed byte, they are refused, or the fold is; nothing stays written."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, 1200, dtype=np.uint8)
    new = changed(old, random.choice([0.003, 0.1, 0.9]), random)
    packed = encode_delta(old, new, 2, version=2, base=1).packed()
    if random.random() < 0.3:
        packed = packed[: random.integers(0, len(packed))].copy()
    else:
        packed[random.integers(0, len(packed))] ^= random.integers(1, 256)
    memory = old.copy()
    try:
        Delta.unpacked(packed).apply(memory)
    except (DecodeError, DamagedBytesError):
        assert np.array_equal(memory, old)
    else:
        assert np.array_equal(memory, new), "the damage was in the head, where versions are"


@pytest.mark.hostile
@pytest.mark.parametrize("last", [5, 8, 9, 250])
def test_changes_reach_to_the_last_word_and_no_further(last):
    """As a reader of 9 words has it, of changes that were found in more."""
    old = np.zeros(300, np.uint8)
    new = old.copy()
    new[last] = 1
    changes = _codec.find_changes(old, new)
    memory = np.zeros(9, np.uint8)
    if last < 9:
        _codec.apply_changes(memory, changes)
        assert memory.nonzero()[0].tolist() == [last]
    else:
        with pytest.raises(DecodeError, match="damaged changes"):
            _codec.apply_changes(memory, changes)
        assert not memory.any()


@pytest.mark.hostile
def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="7 bytes are not elements of 2 bytes"):
        encode_delta(None, np.zeros(7, np.uint8), 2)
    with pytest.raises(ValueError, match="8 bytes can't have become 4"):
        encode_delta(np.zeros(8, np.uint8), np.zeros(4, np.uint8), 2)
    with pytest.raises(ValueError, match="4 bytes can't have become 8"):
        encode_delta(np.zeros(4, np.uint8), np.zeros(8, np.uint8), 2)


def test_places_far_apart_are_told_by_wide_words():
    for step, most in ((2, 4), (300, 10), (70_000, 16)):
        _, indices = _codec._smallest(np.arange(3) * step, 200_000, 4)
        assert len(indices) <= most, step


@pytest.mark.parametrize("size", [0, 8, 4000])
def test_where_nothing_changed_nothing_is_told(size):
    data = np.arange(size).astype(np.uint8)
    delta = Delta.unpacked(encode_delta(data, data, 2, version=2, base=1).packed())
    assert delta.changes.indices.nbytes == delta.changes.values.nbytes == 0
    memory = data.copy()
    delta.apply(memory)
    assert np.array_equal(memory, data)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_all_of_a_tensor_can_be_told_to_who_holds_nothing_of_it(itemsize):
    data = np.arange(160).astype(np.uint8)
    delta = Delta.unpacked(encode_delta(None, data, itemsize, version=2, base=1).packed())
    assert delta.base == NO_VERSION < 0 and not delta.changes.needs_base
    memory = np.full(160, 7, np.uint8)
    delta.apply(memory)
    assert np.array_equal(memory, data)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("field", "change"), [("count", 1), ("count", -1), ("index_bytes", 1), ("index_bytes", -1)]
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_written(field, change):
    old = np.zeros(300, np.uint8)
    new = old.copy()
    new[[3, 200]] = 1
    changes = _codec.find_changes(old, new)
    changes.table[field] += np.uint32(change % 2**32)
    with pytest.raises(DecodeError, match="damaged changes"):
        _codec.apply_changes(old, changes)
    assert not old.any()


@pytest.mark.hostile
@pytest.mark.parametrize("kind", [0, 5, 7, 2**32 - 1])
@pytest.mark.parametrize("indices", [0, 1, 2])
def test_a_kind_of_block_that_is_none_is_refused(kind, indices):
    table = np.array([(kind, 9, indices)], _codec._TABLE)
    changes = _codec.Changes(table, np.full(indices, 255, np.uint8), np.zeros(9, np.uint8))
    with pytest.raises(DecodeError, match="damaged changes: a block of kind"):
        _codec.apply_changes(np.ones(9, np.uint8), changes)


@pytest.mark.parametrize("count", [60, 90, 95, 99, 101, 105, 112, 400, 745, 755, 790])
def test_a_block_is_told_in_the_way_that_takes_least(count):
    """Of 800 words of two bytes: a byte for each changed one, a bit for each of all, or all of them."""
    old = np.zeros(1600, np.uint8)
    new = old.copy()
    new[2 * np.linspace(0, 799, count).astype(int)] = 1
    changes = _codec.find_changes(old.view(np.uint16), new.view(np.uint16))
    least = min(3 * count, 100 + 2 * count, 1600)
    assert changes.indices.nbytes + changes.values.nbytes == least
