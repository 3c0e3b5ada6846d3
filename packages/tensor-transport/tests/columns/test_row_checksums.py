"""Which rows of a column count for its checksum."""

import pytest
import torch

from raycrew.tensor_transport._columns.encoding import checksums
from raycrew.tensor_transport._columns.encoding.checksums import row_checksums


def of(column):
    return row_checksums({"x": column})["x"]


@pytest.mark.parametrize("limit_bytes", [None, 100_000])
def test_every_row_of_a_small_column_counts(monkeypatch, limit_bytes):
    monkeypatch.setattr(checksums, "_BYTES", limit_bytes or checksums._BYTES)
    column = torch.arange(1000)
    before = of(column)
    for row in range(0, 1000, 37):
        changed = column.clone()
        changed[row] += 1
        assert of(changed) != before
    assert of(column.clone()) == before != of(column[:-1])


def test_of_a_large_column_some_rows_count_the_first_and_the_last_among_them(monkeypatch):
    monkeypatch.setattr(checksums, "_BYTES", 1000)
    column = torch.arange(1000)
    before = of(column)
    changed = column.clone()
    changed[0] += 1
    assert of(changed) != before
    changed = column.clone()
    changed[-1] += 1
    assert of(changed) != before
    changed = column.clone()
    changed[1:60] += 1
    assert of(changed) == before, "no more than a few rows are read"
