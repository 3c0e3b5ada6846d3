import pytest

from raycrew.cluster_core import Placement, Rendezvous

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("address", "endpoint"), [("10.0.0.7", "10.0.0.7:29500"), ("fd00::7", "[fd00::7]:29500")]
)
def test_an_endpoint_is_as_in_urls(address, endpoint):
    assert Rendezvous("node", address, (29500, 29501)).endpoint == endpoint


def test_a_placement_has_all_of_its_bundle_unless_that_is_said():
    assert Placement(2, 5) == Placement(rank=2, bundle_index=5, share=1.0, tied_group=None, state="")
