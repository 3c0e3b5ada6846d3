"""What the README of the generation library says of routes is so; its other blocks run elsewhere."""

import pytest

pytest.importorskip("transformers")

from generation_readme import run_on_echoes

from raycrew.tensor_transport import RouteStore, WeightRoute, sync_weights
from raycrew.tensor_transport.testing import LocalPeers


def test_the_block_on_routes_runs(local_ray_session, capsys):
    given = {"WeightRoute": WeightRoute, "RouteStore": RouteStore, "sync_weights": sync_weights}
    with RouteStore() as store:
        run_on_echoes(
            "WeightRoute",
            local_ray_session,
            lambda trainer: given | {"trainer": LocalPeers([trainer])},
            store,
        )
    assert "shared_memory" in capsys.readouterr().out
