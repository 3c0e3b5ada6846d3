import pytest

from raycrew.worker_groups._fan_out.warm_pool.shares import Shares, share_out


@pytest.mark.parametrize(
    ("cpus", "limit", "expected"),
    [
        ({"a": (4.0, 8.0), "b": (1.5, 8.0)}, None, Shares({"a": 4, "b": 1}, True)),
        ({"a": (4.0, 8.0), "b": (0.5, 8.0)}, None, Shares({"a": 4}, True)),
        ({"a": (4.0, 8.0), "b": (4.0, 8.0)}, 3, Shares({"a": 2, "b": 1}, True)),
        ({"a": (4.0, 8.0), "b": (4.0, 8.0)}, 1, Shares({"a": 1}, True)),
        ({"a": (4.0, 8.0), "b": (1.5, 8.0)}, 100, Shares({"a": 4, "b": 1}, True)),
        ({"a": (1.0, 8.0), "b": (4.0, 8.0)}, 4, Shares({"a": 1, "b": 3}, True)),
        ({"a": (0.0, 8.0), "b": (0.0, 1.0), "c": (0.0, 0.0)}, None, Shares({"a": 8, "b": 1}, False)),
        ({"a": (1.0, 8.0), "b": (0.5, 8.0)}, None, Shares({"a": 1}, True)),
        ({"a": (0.0, 0.0)}, None, Shares({"a": 1}, False)),
        ({"a": (0.0, 0.5), "b": (0.0, 0.0)}, None, Shares({"a": 1}, False)),
    ],
)
def test_processes_are_shared_out_by_free_cpus(cpus, limit, expected):
    assert share_out(cpus, limit) == expected
