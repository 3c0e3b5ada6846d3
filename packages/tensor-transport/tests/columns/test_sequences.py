"""Rows packed into one sequence, and back bit by bit."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from batches import assert_same, read_only_copy, same
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend

LENGTHS = [3, 0, 1, 2]


@pytest.fixture
def batch():
    ids = torch.tensor([[1, 2, 3, 0], [0, 0, 0, 0], [4, 0, 0, 0], [5, 6, 0, 0]])
    return BatchedDataDict(
        ids=ids,
        mask=torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]),
        logprobs=RaggedTensor(torch.arange(6.0), LENGTHS),
        lengths=LENGTHS,
        text=["a", "b", "c", "d"],
        plain=torch.ones(4),
    )


def test_without_padding(batch):
    packed = batch.pack_sequences(["ids", "logprobs"], "lengths")
    assert packed.columns["ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.cu_seqlens.tolist() == packed.cu_seqlens_padded.tolist() == [0, 3, 3, 4, 6]
    assert packed.cu_seqlens.dtype == torch.int32 and packed.max_seqlen == 3
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.labels("ids").tolist() == [2, 3, -100, -100, 6, -100]
    assert packed.label_mask.tolist() == [True, True, False, False, True, False]
    assert packed.token_mask.all()
    assert packed.shifted("logprobs", -1).tolist() == [1, 2, -1, -1, 5, -1]


def test_with_padding_between(batch):
    packed = batch.pack_sequences(["ids", "mask"], "lengths", pad_multiple=2, pad_value_dict={"ids": 9})
    assert packed.columns["ids"].tolist() == [1, 2, 3, 9, 4, 9, 5, 6]
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 4, 6]
    assert packed.cu_seqlens_padded.tolist() == [0, 4, 4, 6, 8]
    assert packed.max_seqlen == 4
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert packed.token_mask.tolist() == [True, True, True, False, True, False, True, True]
    assert packed.labels("ids").tolist() == [2, 3, -100, -100, -100, -100, 6, -100]
    assert packed.labels("ids", mask="mask").tolist() == [2, 3, -100, -100, -100, -100, 6, -100]
    assert packed.shifted("mask").tolist() == [1, 1, 0, 0, 0, 0, 1, 0]
    of_prompt = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1])
    assert packed.labels("ids", mask=of_prompt, ignore_index=-1).tolist() == [-1, 3, -1, -1, -1, -1, 6, -1]


def test_outputs_of_a_model_come_back_as_rows(batch):
    packed = batch.pack_sequences(["ids"], "lengths", pad_multiple=4)
    hidden = torch.arange(len(packed.columns["ids"]) * 2).view(-1, 2)
    rows = packed.rows(hidden)
    assert rows.lengths.tolist() == LENGTHS
    assert rows[3].tolist() == [[16, 17], [18, 19]]
    assert batch.union({"hidden": rows}).size == 4
    for use in (packed.rows, packed.shifted, lambda values: packed.labels("ids", mask=values)):
        with pytest.raises(ValueError, match="not one for each of the 12 tokens"):
            use(hidden[:6, 0])


@given(
    lengths=st.lists(st.integers(0, 5), max_size=6),
    extra=st.integers(0, 2),
    multiple=st.integers(1, 4),
    side=st.sampled_from(["left", "right"]),
    dtype=st.sampled_from([torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16]),
    inner=st.sampled_from([(), (2,)]),
)
def test_there_and_back_bit_by_bit(lengths, extra, multiple, side, dtype, inner):
    tokens, width = sum(lengths), max(lengths, default=0) + extra
    values = torch.randint(0, 2, (tokens, *inner)).to(dtype)
    ragged = RaggedTensor(values, lengths)
    padded = ragged.to_padded(1, pad_side=side, length=width)
    batch = BatchedDataDict(p=padded, r=ragged, n=torch.tensor(lengths, dtype=torch.int64))
    packed = batch.pack_sequences(
        ["r", "p"], "n", pad_multiple=multiple, pad_value_dict={"p": 1}, pad_side=side
    )
    assert same(packed.unpack(), {"r": ragged, "p": padded})
    ends = packed.cu_seqlens_padded.tolist()
    assert ends == [sum(-(-n // multiple) * multiple for n in lengths[:i]) for i in range(len(lengths) + 1)]
    expected = [position for start, end in itertools.pairwise(ends) for position in range(end - start)]
    assert packed.position_ids.tolist() == expected
    assert len(packed.columns["p"]) == len(expected) == ends[-1]


def test_planned_microbatches(batch):
    (shard,), _ = batch.shard_by_batch_size(
        1, sequence_packing_args={"max_tokens_per_microbatch": 4, "input_lengths_key": "lengths"}
    )
    for microbatch in shard.make_microbatch_iterator_for_packable_sequences():
        packed = microbatch.pack_sequences(["ids"], "lengths")
        assert len(packed.columns["ids"]) <= 4
        assert microbatch.union(packed.unpack()) == microbatch


def test_writes_do_not_reach_other_readers(batch):
    buffers = []
    payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    shared = [read_only_copy(buffer) for buffer in buffers]
    received = pickle.loads(payload, buffers=shared)
    packed = received.pack_sequences(["logprobs"], "lengths")
    packed.columns["logprobs"].zero_()
    assert_same(pickle.loads(payload, buffers=shared), batch)


@pytest.mark.parametrize(
    ("change", "arguments", "error", "match"),
    [
        ({}, {"keys": ["idz"]}, KeyError, "did you mean 'ids'"),
        ({}, {"keys": []}, ValueError, "at least one column"),
        ({}, {"keys": "ids"}, TypeError, "one string 'ids'"),
        ({}, {"keys": ["text"]}, BatchSchemaError, "column 'text' holds no tokens"),
        ({}, {"keys": ["plain"]}, BatchSchemaError, "column 'plain' holds no tokens"),
        ({"p": PackedTensor([None] * 4)}, {"keys": ["p"]}, BatchSchemaError, "column 'p' holds no tokens"),
        ({"a": np.ones((4, 4))}, {"keys": ["a"]}, BatchSchemaError, "column 'a' holds no tokens"),
        (
            {"lengths": [5, 0, 0, 0]},
            {"keys": ["ids"]},
            BatchSchemaError,
            "column 'ids': lengths .* do not fit",
        ),
        ({"lengths": [1, 1, 1, 1]}, {"keys": ["logprobs"]}, BatchSchemaError, "'logprobs' .* other lengths"),
        ({"lengths": [-1, 1, 1, 1]}, {"keys": ["ids"]}, BatchSchemaError, "column 'lengths' holds lengths"),
        ({}, {"input_lengths_key": "length"}, ValueError, "did you mean 'lengths'"),
        ({}, {"pad_multiple": 0}, ValueError, "at least 1, not 0"),
        ({}, {"pad_side": "top"}, ValueError, "'left' or 'right'"),
        ({}, {"pad_value_dict": {"id": 1}}, ValueError, "did you mean 'ids'"),
        ({}, {"pad_value_dict": {"ids": 0.5}}, BatchSchemaError, "column 'ids' .* does not hold the padding"),
    ],
)
def test_wrong_input_is_named(batch, change, arguments, error, match):
    batch.update(change)
    with pytest.raises(error, match=match):
        batch.pack_sequences(**{"keys": ["ids"], "input_lengths_key": "lengths"} | arguments)


@pytest.mark.hostile
def test_tokens_on_the_meta_device_are_named(batch):
    for key in ("ids", "logprobs"):
        with pytest.raises(BatchSchemaError, match=f"column '{key}' is on the meta device"):
            batch.copy().select([key]).to("meta").union({"lengths": LENGTHS}).pack_sequences([key], "lengths")


@pytest.mark.hostile
def test_a_mask_of_another_shape_makes_no_labels(batch):
    packed = batch.pack_sequences(["ids"], "lengths")
    for mask in (torch.ones(6, 1), torch.ones(6, 6)):
        with pytest.raises(
            ValueError, match=r"a mask of shape \(6, \d\) is not one for labels of shape \(6,\)"
        ):
            packed.labels("ids", mask=mask)
    for use in (packed.labels, packed.shifted, packed.rows):
        with pytest.raises(KeyError, match=r"there are no columns idz; .*did you mean 'ids'"):
            use("idz")


def test_a_mask_of_tokens_counts_for_all_that_a_token_has():
    heads = torch.arange(8).view(1, 4, 2)
    packed = BatchedDataDict(ids=heads, n=[4]).pack_sequences(["ids"], "n")
    labels = packed.labels("ids", mask=torch.tensor([1, 1, 0, 1]))
    assert labels.tolist() == [[2, 3], [-100, -100], [6, 7], [-100, -100]]
    assert packed.labels("ids", mask=heads[0] % 2).tolist()[0] == [-100, 3]


def test_gradients_pass(batch):
    batch["ids"] = batch["ids"].float().requires_grad_()
    packed = batch.pack_sequences(["ids"], "lengths", pad_multiple=2)
    (packed.shifted("ids").sum() + packed.unpack()["ids"].sum()).backward()
    assert batch["ids"].grad[0].tolist() == [1, 2, 2, 0]


def test_handles_and_labels_that_a_dtype_does_not_hold(batch):
    handles = remotize(batch.select(["ids", "logprobs"]), ShardRegistry(InProcessBackend()))
    handles["lengths"] = LENGTHS
    for key in ("ids", "logprobs"):
        with pytest.raises(BatchSchemaError, match=rf"column '{key}' .*localize\(\)"):
            handles.pack_sequences([key], "lengths")
    batch["ids"] = batch["ids"].to(torch.uint8)
    with pytest.raises(BatchSchemaError, match=r"column 'ids' of .*uint8 does not hold the padding -100"):
        batch.pack_sequences(["ids"], "lengths").labels("ids")
