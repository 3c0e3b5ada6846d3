"""One endpoint for replicas that come and go; no engine, and no Ray."""

import http.client
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "generation"))

from generation import Generators
from generation.openai.following import _Followed, one_endpoint
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import ResultTimeoutError, WorkerFailureError, current_worker
from raycrew.worker_groups.services import AppServer, Endpoint
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


class Told:
    """A group of two replicas, of which it is told what becomes of questions to the second one."""

    leaders = (0, 1)

    def __init__(self):
        self.refusal = self.failure = None
        self.asked, self.is_replaced = 0, threading.Event()

    @property
    def group(self):
        return self

    def on(self, ranks, timeout):
        return SimpleNamespace(call=lambda method: self._sent(ranks))

    def _sent(self, ranks):
        failure = None
        if list(ranks) == [1]:
            self.asked += 1
            failure = self.failure
            if self.refusal is not None:
                raise self.refusal

        def results(timeout=None):
            if failure is not None:
                self.is_replaced.wait(PATIENCE_S)
                raise failure
            return [Endpoint(f"http://127.0.0.1:{rank + 1}", None) for rank in ranks]

        return SimpleNamespace(
            return_from_workers=ranks, get_results=results, exception=lambda timeout: failure
        )


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def followed(told):
    followed = _Followed(told)
    yield followed
    told.is_replaced.set()
    followed.end()


@pytest.mark.hostile
@pytest.mark.parametrize("who", ["us", "others"])
def test_one_that_died_gets_no_requests_while_it_is_being_replaced(told, followed, who):
    assert len(followed()) == 2
    if who == "us":
        told.failure = WorkerFailureError("it died", rank=1, cause=RayActorError())
    else:
        told.refusal = ResultTimeoutError("it is still being restarted", [1])
    eventually(lambda: [endpoint.port for endpoint in followed()] == [1], "only who lives is known")
    told.failure = told.refusal = None
    told.is_replaced.set()
    eventually(lambda: len(followed()) == 2, "the next one is known")


def test_one_that_can_not_say_its_endpoint_for_now_keeps_it(told, followed):
    told.is_replaced.set()  # nothing is
    told.failure = WorkerFailureError("it raised", rank=1, cause=ValueError("not now"))
    before = told.asked
    eventually(lambda: told.asked >= before + 3, "it was asked again")
    assert len(followed()) == 2
