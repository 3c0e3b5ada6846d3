"""Columns that are cut, truncated, padded and joined, as those of tensors are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport._rows import Window


def test_columns_are_cut_in_their_own_numbering():
    assert Window(0, 6, 10).cut(0, 6) == Window(0, 6, 10), "nothing was cut"
    assert Window(0, 6, 10).cut(0, 5) == Window(0, 5, 5)
    assert Window(0, 6, 10).cut(1, 6) == Window(1, 6, None)
    assert Window(4, 10, 10).cut(0, 5) == Window(4, 9, None)
    assert Window(1, 6, None).cut(2, 3) == Window(3, 4, None)
    assert Window(0, 6, 10).cut(3, 3).shown == 0
    for start, end in [(-1, 2), (2, 1), (0, 7)]:
        with pytest.raises(IndexError, match=rf"columns {start}\.\.{end} are not within 6"):
            Window(0, 6, 10).cut(start, end)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 12))
def test_what_was_trimmed_on_the_right_is_truncated_as_the_tensor_is(used, more, length):
    whole = Window(0, used, used + more)
    found, want = whole.truncated(length), torch.zeros(1, used + more)[:, :length]
    assert found.padded() == Window(0, want.shape[1], want.shape[1])
    assert (found.start, found.end) == (0, min(used, length))


def test_what_was_trimmed_on_the_left_is_truncated_as_it_is_shown():
    whole = Window(4, 10, 10)
    assert whole.truncated(10) == whole and whole.padded() == Window(0, 10, 10)
    assert whole.truncated(8) == whole.truncated(6) == Window(4, 10, None), "padded, it would be longer"
    assert Window(2, 7, 10).truncated(8) == Window(2, 7, 8), "padding on both sides"
    assert Window(2, 7, 10).truncated(7) == Window(2, 7, 7)
    assert whole.truncated(2) == Window(4, 6, None) == Window(4, 6, None).padded()
    assert Window(4, 6, None).truncated(1) == Window(4, 5, None)
    with pytest.raises(IndexError):
        whole.truncated(-1)


def test_columns_join_where_they_are_equally_wide_or_padded_on_the_right():
    assert Window.joined([Window(0, 3, 8), Window(0, 5, 6)]) == Window(0, 5, 8)
    assert Window.joined([Window(0, 3, 9), Window(0, 7, 8), Window(0, 0, 1)]) == Window(0, 7, 9)
    assert Window.joined([Window(0, 3, 8), Window(2, 5, 8)]) == Window(0, 5, 8)
    assert Window.joined([Window(2, 5, None), Window(2, 5, None)]) == Window(2, 5, None)
    assert Window.joined([Window(2, 5, None), Window(2, 5, 8)]) == Window(2, 5, None)
    for a, b, widths in [
        (Window(0, 3, 8), Window(1, 3, 9), "8 and 9"),
        (Window(0, 3, 8), Window(3, 9, 9), "8 and 9"),
        (Window(0, 3, 3), Window(0, 3, 9), "3 and 9"),
        (Window(0, 3, 8), Window(0, 9, 9), "8 and 9"),
        (Window(0, 3, 8), Window(1, 3, None), "8 and cut ones"),
        (Window(0, 3, None), Window(1, 3, None), "cut ones"),
    ]:
        with pytest.raises(ValueError, match=rf"\(0, 3\).* of {widths} do not join"):
            Window.joined([a, b])
