"""What lies in memory that others read stays marked so when it is joined, unless joining copies it."""

import pytest
import torch

from raycrew.tensor_transport import BatchedDataDict, PackedTensor
from raycrew.tensor_transport._columns.joining.columns import join_columns
from raycrew.tensor_transport._columns.kinds import Padding, Received, bare


def no_padding(_key):
    return Padding()


def test_only_what_is_copied_is_the_joiners_own():
    received = {"ids": Received(torch.arange(2)), "images": Received(PackedTensor([torch.ones(2), None]))}
    own = {"ids": torch.arange(2), "images": PackedTensor([torch.zeros(2), None])}
    joined = join_columns([own, received], no_padding)
    assert isinstance(joined["images"], Received), "its segments are the sender's"
    assert not isinstance(joined["ids"], Received), "its rows were copied"
    assert not isinstance(join_columns([own, own], no_padding)["images"], Received)
    assert bare(joined["ids"]).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "operation", [lambda batch: batch.repeat_interleave(2), lambda batch: batch.select_indices([1, 0])]
)
def test_what_an_operation_copied_is_not_copied_again_when_it_is_read(operation):
    batch = BatchedDataDict(ids=torch.arange(2), images=PackedTensor([torch.ones(2), None]))
    batch._columns = {key: Received(column) for key, column in batch._columns.items()}
    changed = operation(batch)
    assert not isinstance(changed._columns["ids"], Received)
    assert isinstance(batch._columns["ids"], Received), "the sender's as before"


@pytest.mark.hostile
def test_a_write_to_what_was_joined_is_not_seen_by_who_sent_it():
    segment = torch.ones(2)
    segment.numpy().flags.writeable = False
    batch = BatchedDataDict({"images": PackedTensor([torch.zeros(2)])})
    batch._columns["images"] = Received(PackedTensor([segment]))
    joined = BatchedDataDict.concat([batch, BatchedDataDict({"images": PackedTensor([torch.zeros(2)])})])
    joined["images"][0].add_(1)
    assert segment.tolist() == [1, 1]
