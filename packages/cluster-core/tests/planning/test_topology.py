import pytest

from raycrew.cluster_core import Rendezvous

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("address", "endpoint"), [("10.0.0.7", "10.0.0.7:29500"), ("fd00::7", "[fd00::7]:29500")]
)
def test_an_endpoint_is_as_in_urls(address, endpoint):
    assert Rendezvous("node", address, (29500, 29501)).endpoint == endpoint
