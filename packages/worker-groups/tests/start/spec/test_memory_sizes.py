"""Sizes of memory, as options give them."""

import pytest

from raycrew.worker_groups._start.spec.sizes import size_bytes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (8, 8),
        (1, 1),
        ("8", 8),
        ("8B", 8),
        ("8GB", 8 * 10**9),
        ("8 GiB", 2**33),
        ("1.5KB", 1500),
        ("2TiB", 2**41),
    ],
)
def test_sizes(value, size):
    assert size_bytes("limit", value) == size


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("", ValueError),
        ("GB", ValueError),
        ("8gb", ValueError),
        ("0.1", ValueError),
        (0, ValueError),
        (8.0, TypeError),
    ],
)
def test_what_is_no_size(value, error):
    with pytest.raises(error, match="limit is"):
        size_bytes("limit", value)
