"""What the processes of a cluster inherit of the environment of whoever starts it."""

import os

import pytest
import ray

from raycrew.cluster_core._ray import compat

pytestmark = [pytest.mark.hostile, pytest.mark.smoke]


@pytest.mark.parametrize(("address", "inherited"), [("local", None), ("a:1", "a:1")])
def test_a_cluster_that_is_started_inherits_no_address_of_another(address, inherited, monkeypatch):
    seen = []
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ.get("RAY_ADDRESS")))
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    compat.init(address=address)
    assert seen == [inherited] and os.environ["RAY_ADDRESS"] == "a:1"
