"""An application of one's own from a thread of a process: behind its token, until it is shut down."""

import pickle

import pytest
from asking import ask, is_open, told

pytest.importorskip("uvicorn")

from raycrew.worker_groups.services import AppServer, ServiceClosedError


async def app(scope, receive, send):
    body = b'{"path": "%s"}' % scope["path"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_an_application_is_served_behind_its_token_until_the_end():
    with AppServer(app) as server:
        endpoint = server.endpoint
        assert told(endpoint, "/here") == {"path": "/here"}
        assert ask(endpoint, "/here", told=False)[0] == 401
        with pytest.raises(TypeError, match="pass its endpoint on"):
            pickle.dumps(server)
    assert not is_open(endpoint.port)
    server.shutdown()
    with pytest.raises(ServiceClosedError):
        _ = server.endpoint


def test_it_may_be_open():
    with AppServer(app, token=None) as server:
        assert ask(server.endpoint, "/here", told=False)[0] == 200


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"app": "package.app:create"}, TypeError),
        ({"token": "short"}, ValueError),
        ({"max_connections": 0}, ValueError),
        ({"idle_timeout_s": 0}, ValueError),
        ({"port": 1 << 17}, ValueError),
        ({"host": 3}, TypeError),
    ],
)
def test_what_can_not_be_meant_is_refused(wrong, kind):
    with pytest.raises(kind):
        AppServer(**{"app": app, **wrong})
