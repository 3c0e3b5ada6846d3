"""Whether a result is in an object store, told by what this process has heard of it."""

import pytest
import ray

from raycrew.worker_groups._ray import compat, is_stored


@pytest.mark.parametrize(
    ("where", "stored"),
    [
        ({"node_ids": ["n"], "object_size": 10, "did_spill": False}, True),
        ({"node_ids": [], "object_size": 10, "did_spill": True}, True),
        ({"node_ids": [], "object_size": 2**20, "did_spill": False}, True),  # where is not heard yet
        ({"node_ids": [], "object_size": 1423, "did_spill": False}, False),  # as what says of a death
        ({"node_ids": [], "object_size": None, "did_spill": False}, False),
        ({}, False),
    ],
)
def test_it_is_where_it_is_somewhere_or_large(monkeypatch, where, stored):
    ref = ray.ObjectRef.from_random()
    monkeypatch.setattr(compat, "is_behind_proxy", lambda: False)
    monkeypatch.setattr(compat, "get_local_object_locations", lambda refs: {ref: where} if where else {})
    assert is_stored(ref) is stored
