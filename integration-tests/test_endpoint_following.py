"""One endpoint for replicas that come and go; no engine, and no Ray."""

import http.client
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "generation"))

from generation import Generators
from generation.openai.following import one_endpoint
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import current_worker
from raycrew.worker_groups.services import AppServer
from raycrew.worker_groups.testing import InProcessGroup

PATIENCE_S = 120


class Replica:
    """Answers with its rank; its port is taken over by another one once it has left."""

    def __init__(self):
        self.server = AppServer(answering(b"%d" % current_worker().rank), token=None)

    def endpoint(self):
        return self.server.endpoint

    def leave(self):
        port = self.server.endpoint.port
        self.server.shutdown()
        self.server = AppServer(answering(b"a stranger"), token=None, port=port)

    def close(self):
        self.server.shutdown()


def answering(body):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


def heard(endpoint):
    """Who answers, in some requests."""
    found = set()
    for _ in range(6):
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=PATIENCE_S)
        connection.request("GET", "/", headers=dict(endpoint.headers))
        found.add(connection.getresponse().read())
        connection.close()
    return found


def eventually(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


@pytest.mark.hostile
def test_replicas_that_left_get_no_requests_and_those_that_came_do():
    with (
        InProcessGroup(FakeCluster([3]), Replica, workers_per_node=2) as group,
        one_endpoint(Generators(group), strategy="round_robin") as endpoint,
    ):
        try:
            assert heard(endpoint) == {b"0", b"1"}
            group.add_workers()
            eventually(lambda: heard(endpoint) == {b"0", b"1", b"2"}, "the new one answers")
            group.remove_workers(2, cleanup_method="leave")
            eventually(lambda: heard(endpoint) == {b"0"}, "only who is left answers")
            group.add_workers()
            eventually(lambda: heard(endpoint) == {b"0", b"1"}, "the next one answers, too")
        finally:
            group.call("close").get_results()
