"""Columns of lengths, and dtypes whose elements can be assigned by mask."""

import numpy as np
import pytest
import torch

from raycrew.tensor_transport import BatchSchemaError
from raycrew.tensor_transport._bytes import raw
from raycrew.tensor_transport._columns.lengths import as_wide, padded_width, row_lengths


def test_lengths_are_integers_from_zero_to_what_an_int32_holds():
    assert row_lengths(torch.tensor([0, 3, 2**31 - 1]), "n").tolist() == [0, 3, 2**31 - 1]
    assert row_lengths([], "n").tolist() == [] and row_lengths([3], "n").tolist() == [3]
    with pytest.raises(BatchSchemaError, match=r"one length per row: int64 of shape \(\)"):
        row_lengths(torch.tensor(3), "n")
    for wrong in ([-1, 2], [1, 2**31], [0.5], [[1]]):
        with pytest.raises(BatchSchemaError, match="column 'n'"):
            row_lengths(torch.tensor(wrong), "n")


def test_columns_as_wide_as_the_planned_tokens_are_those_and_what_has_no_width():
    columns = {
        "ids": torch.zeros(2, 5), "narrow": torch.zeros(2, 4), "wide": torch.zeros(2, 6),
        "flat": torch.zeros(2), "texts": ["a", "b"], "array": np.zeros((2, 5)), "other": np.zeros((2, 6)),
    }  # fmt: skip
    assert as_wide(columns, 1, 5) == ["ids", "texts", "array"]
    arrays = {"array", "other"}
    assert as_wide(columns, 1, None) == [key for key in columns if key not in arrays], "nobody named them"
    assert as_wide(columns | {"deep": torch.zeros(2, 1, 5)}, 2, 5) == ["texts", "deep"]


def test_tokens_are_as_wide_as_their_second_dimension():
    assert padded_width(torch.zeros(2, 3), "x") == padded_width(torch.zeros(2, 3, 4), "x") == 3
    assert padded_width(["a", "b"], "x") is None
    with pytest.raises(BatchSchemaError, match=r"'x' of shape \[2\] does not hold tokens"):
        padded_width(torch.zeros(2), "x")


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (torch.float8_e4m3fn, torch.uint8),
        (torch.float8_e5m2, torch.uint8),
        (torch.int8, torch.int8),
        (torch.uint16, torch.int16),
        (torch.uint32, torch.int32),
        (torch.uint64, torch.int64),
        (torch.bool, torch.bool),
        (torch.float16, torch.float16),
    ],
)
def test_what_is_assigned_by_mask_has_that_operation(dtype, seen):
    tensor = torch.zeros(3).to(dtype)
    raw(tensor)[torch.tensor([True, False, True])] = 1
    assert raw(tensor).dtype == seen and raw(tensor).tolist() == [1, 0, 1]
