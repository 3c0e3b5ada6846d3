"""Which bundles replicas get, and what an endpoint shows."""

import pickle

import pytest
from service_values import TOKEN

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups.services import Endpoint, ReplicaState
from raycrew.worker_groups.services._endpoint import url_of
from raycrew.worker_groups.services._places import places_for


def test_replicas_are_spread_over_nodes():
    bundles = FakeCluster([2, 1, 2]).bundles
    assert places_for(bundles, {}, 1, 3) == [[0], [2], [3]]
    assert places_for(bundles, {}, 1, 5) == [[0], [2], [3], [1], [4]]


def test_free_bundles_come_first_and_where_there_are_too_few_the_claim_says_who_holds_them():
    bundles = FakeCluster([2, 2]).bundles
    assert places_for(bundles, {0: ("a",), 2: ("a",)}, 1, 2) == [[1], [3]]
    assert places_for(bundles, {0: ("a",)}, 1, 2) == [[1], [2]]
    assert places_for(bundles, {0: ("a",), 2: ("a", "b")}, 2, 3) == [[0], [3], [1]]
    assert places_for(bundles, {0: ("a",)}, 1, 4) == [[0], [2], [1], [3]]
    with pytest.raises(ValueError, match="the cluster has 4"):
        places_for(bundles, {}, 1, 5)


def test_an_endpoint_is_a_value_that_hides_its_token():
    endpoint = Endpoint(url_of("10.0.0.7", 8000), TOKEN, 1, (8000, 8001))
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint
    assert TOKEN not in f"{endpoint!r} {endpoint}"
    assert (endpoint.host, endpoint.port) == ("10.0.0.7", 8000)
    assert endpoint.headers == {"Authorization": f"Bearer {TOKEN}"}
    assert Endpoint("http://somewhere").headers == {}
    least = Endpoint("http://somewhere")
    assert (least.port, least.rank, least.ports) == (80, 0, ())
    for wrong in ("", "of two words", "ü"):
        with pytest.raises(ValueError, match="printable characters of ASCII"):
            Endpoint("http://somewhere", wrong)
    assert url_of("fe80::1", 80) == "http://[fe80::1]:80"


@pytest.mark.parametrize(
    "url",
    [
        "https://a:1",
        "http://",
        "a:1",
        "http://u:p@a:1",
        "http://a:1/b",
        "http://a:1/?c",
        "http://a:x",
        "http://a#b",
        "http://a:0",
        "http://a:99999",
    ],
)
def test_a_url_that_would_not_be_asked_as_it_is_written_is_refused(url):
    with pytest.raises(ValueError, match="http://host:port"):
        Endpoint(url)


def test_of_a_replica_that_only_just_began_nothing_else_is_told():
    state = ReplicaState(2, "ready")
    assert (state.restarts, state.reason, state.log_tail) == (0, "", "")
    assert (state.endpoint, state.pid, state.exit_code) == (None, None, None)
