"""What a type checker makes of batches: read by the type checker, never run."""

from typing import Any, TypedDict, assert_type

import numpy as np
import torch

from raycrew.tensor_transport import BatchedDataDict, SlicedDataDict


class Columns(TypedDict):
    """A batch's columns, for those who name them."""

    ids: torch.Tensor


class Rollouts(BatchedDataDict):
    """A class of batches that names no columns."""


def a_batch_needs_no_annotation() -> None:
    batch = BatchedDataDict({"ids": torch.arange(4), "text": ["a", "b", "c", "d"]}, metadata={"step": 1})
    assert_type(batch, BatchedDataDict[Any])
    empty = BatchedDataDict()
    assert_type(empty, BatchedDataDict[Any])
    assert_type(BatchedDataDict.from_dict({"ids": [1]}), BatchedDataDict[Any])
    assert_type(BatchedDataDict(ids=[1]).slice(0, 1), SlicedDataDict[Any])


def rows_and_columns_are_told_apart(batch: BatchedDataDict, mask: torch.Tensor, rollouts: Rollouts) -> None:
    assert_type(batch[1:3], BatchedDataDict[Any])
    assert_type(batch[[0, 2]], BatchedDataDict[Any])
    assert_type(batch[mask], BatchedDataDict[Any])
    assert_type(rollouts[np.array([0])], Rollouts)
    assert_type(rollouts.pop(["ids"]), Rollouts)
    assert_type(rollouts.pad_to_divisor(8), tuple[Rollouts, int])
    column: torch.Tensor = batch["ids"]
    named: BatchedDataDict[Columns] = BatchedDataDict({"ids": column})
    taken: torch.Tensor = named.pop("ids")
    del taken
