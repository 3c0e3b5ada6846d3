"""Methods of a group over HTTP, here of one in this process: what is answered, and what is told."""

import json
import logging
import socket
import threading
from contextlib import contextmanager

import pytest
from asking import ask, is_open
from patience import eventually
from ray.exceptions import RayActorError, TaskCancelledError

pytest.importorskip("uvicorn")

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
    current_worker,
)
from raycrew.worker_groups.services import Gateway
from raycrew.worker_groups.services._forwarding.calling import CallError, arguments_of
from raycrew.worker_groups.testing import InProcessGroup

go_on = threading.Event()


class Generator:
    def generate(self, prompt="", times=1):
        return {"text": prompt[::-1] * times, "rank": current_worker().rank}

    def fail(self):
        raise KeyError("no model")

    def strange(self):
        return object()

    def not_a_number(self):
        return {"reward": float("nan")}

    def wait(self):
        go_on.wait(60)

    def stream(self):
        yield 1

    def hidden(self):
        return "secret"


METHODS = ("generate", "fail", "strange", "not_a_number", "wait", "stream", "none")


@contextmanager
def gateway_of(strategy="least_outstanding", **options):
    go_on.clear()
    with (
        InProcessGroup(
            FakeCluster([3]), Generator, enable_load_balancing=True, load_balancing_strategy=strategy
        ) as group,
        Gateway(group, METHODS, **options) as gateway,
    ):
        try:
            yield gateway
        finally:
            go_on.set()


def post(gateway, method, value=None, **options):
    body = json.dumps({} if value is None else value).encode()
    status, _, answer = ask(gateway.endpoint, f"/{method}", method="POST", body=body, **options)
    return status, json.loads(answer)


def outcome_of(answer):
    status, told = answer
    return status, told["outcome"]


def test_a_request_is_a_call_on_one_worker():
    with gateway_of() as gateway:
        told = [post(gateway, "generate", {"prompt": "abc", "times": 2}) for _ in range(3)]
        assert [(status, value["text"]) for status, value in told] == [(200, "cbacba")] * 3
        assert {value["rank"] for _, value in told} == {0, 1, 2}
        assert post(gateway, "generate", told=False)[0] == 401
        port = gateway.endpoint.port
    assert not is_open(port)


def test_what_has_no_result_is_told_with_whether_it_has_run():
    with gateway_of() as gateway:
        for method, value, status, outcome, said in (
            ("hidden", None, 404, "surely not run", "hidden"),
            ("none", None, 404, "surely not run", "none"),
            ("generate", {"prompt": "a", "size": 1}, 400, "surely not run", "size"),
            ("generate", [1], 400, "surely not run", "object"),
            ("generate", {"key": 1}, 400, "surely not run", "key"),
            ("fail", None, 500, "has run", "KeyError: 'no model'"),
            ("strange", None, 500, "has run", "JSON"),
            ("not_a_number", None, 500, "has run", "JSON"),
            ("stream", None, 501, "perhaps run", "stream"),
        ):
            found, told = post(gateway, method, value)
            assert (found, told["outcome"]) == (status, outcome), (method, told)
            assert said in told["error"]
        assert ask(gateway.endpoint, "/generate")[0] == 405
    with gateway_of(timeout_s=1.0) as gateway:  # a busy machine may not send it in time
        eventually(lambda: outcome_of(post(gateway, "wait")) == (504, "perhaps run"), "it was sent")


def test_a_session_stays_with_its_worker():
    with gateway_of("consistent_hash", key="json:prompt") as gateway:
        ranks = {}
        for prompt in map(str, range(9)):
            ranks[prompt] = {post(gateway, "generate", {"prompt": prompt})[1]["rank"] for _ in range(2)}
        assert all(len(each) == 1 for each in ranks.values())
        assert len(set.union(*ranks.values())) > 1
        assert post(gateway, "generate")[0] == 400, "no key"


class Lossy:
    """A balancer whose workers die under the first calls."""

    needs_key = False

    def __init__(self, losses, error):
        self.losses, self.error, self.calls = losses, error, 0

    @property
    def balancer(self):
        return self

    def _open(self):
        """It is."""

    def call(self, method, *, key, timeout, **arguments):
        self.calls += 1
        return Future(self.error if self.calls <= self.losses else None)


class Future:
    is_stream = False

    def __init__(self, error):
        self.error, self.is_cancelled = error, threading.Event()

    def cancel(self):
        self.is_cancelled.set()

    def __await__(self):
        if self.error is not None:
            raise self.error
        return [7]
        yield


DEATH = WorkerFailureError("it died", rank=1, cause=RayActorError())


@pytest.mark.parametrize(
    ("losses", "headers", "error", "wanted"),
    [
        (1, {"Idempotency-Key": "a"}, DEATH, (200, 2)),
        (1, {}, DEATH, (502, 1)),
        (9, {"Idempotency-Key": "a"}, DEATH, (502, 3)),
        (1, {"Idempotency-Key": "a"}, WorkerFailureError("it raised", cause=ValueError()), (500, 1)),
        (1, {"Idempotency-Key": "a"}, WorkerGroupError("who knows"), (502, 1)),
    ],
)
def test_a_call_is_made_again_only_if_it_may_run_twice_and_its_worker_died(losses, headers, error, wanted):
    group = Lossy(losses, error)
    with Gateway(group, ["generate"], resends=2) as gateway:
        status, _ = post(gateway, "generate", headers=headers)
    assert (status, group.calls) == wanted


class Slow(Lossy):
    """A balancer that takes a while to send a call."""

    def __init__(self):
        super().__init__(0, None)
        self.is_asked, self.goes_on, self.future = threading.Event(), threading.Event(), Future(None)

    def call(self, method, **arguments):
        self.is_asked.set()
        self.goes_on.wait(30)
        return self.future


def test_a_call_whose_client_leaves_while_it_is_sent_is_cancelled():
    group = Slow()
    with Gateway(group, ["generate"], token=None, max_connections=1) as gateway:
        with socket.create_connection(("127.0.0.1", gateway.endpoint.port)) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\ncontent-length: 0\r\n\r\n")
            assert group.is_asked.wait(30)
        eventually(lambda: ask(gateway.endpoint, "/generate")[0] == 405, "the client's place is free")
        group.goes_on.set()
        assert group.future.is_cancelled.wait(30)


def test_calls_that_are_made_again_share_one_deadline():
    given = []

    class Timed(Lossy):
        def call(self, method, *, timeout, **arguments):
            given.append(timeout)
            return super().call(method, timeout=timeout, **arguments)

    with Gateway(Timed(2, DEATH), ["generate"], timeout_s=60.0) as gateway:
        assert post(gateway, "generate", headers={"Idempotency-Key": "a"})[0] == 200
    assert 60.0 >= given[0] > given[1] > given[2]
    with Gateway(Timed(0, None), ["generate"], timeout_s=None) as gateway:
        assert post(gateway, "generate")[0] == 200
    assert given[3] is None


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [(ValueError("no"), "has run"), (TaskCancelledError(), "perhaps run"), (None, "perhaps run")],
)
def test_only_a_method_that_raised_has_run_for_sure(cause, outcome):
    failure = WorkerFailureError("it failed", cause=cause)
    with Gateway(Lossy(1, failure), ["generate"]) as gateway:
        status, told = post(gateway, "generate")
    assert (status, told["outcome"]) == (500, outcome)


class Refusing(Lossy):
    """A balancer that sends no call any more after the first ones, or says so."""

    def __init__(self, losses, refusal):
        super().__init__(losses, DEATH)
        self.refusal = refusal

    def call(self, method, **arguments):
        if self.calls == self.losses:
            raise self.refusal
        return super().call(method, **arguments)


@pytest.mark.parametrize(
    ("losses", "refusal", "wanted"),
    [
        (0, WorkerGroupError("every worker is lost"), (503, "surely not run")),
        (0, ResultTimeoutError("they are being replaced"), (503, "surely not run")),
        (0, WorkerGroupClosedError("the connection to Ray has ended"), (503, "perhaps run")),
        (0, TypeError("size"), (400, "surely not run")),
        (1, WorkerGroupError("every worker is lost"), (503, "perhaps run")),
        (1, ResultTimeoutError("they are being replaced"), (503, "perhaps run")),
        (1, TypeError("size"), (400, "perhaps run")),
    ],
)
def test_a_call_that_can_not_be_sent_has_surely_not_run_only_if_it_never_was(losses, refusal, wanted):
    with Gateway(Refusing(losses, refusal), ["generate"]) as gateway:
        answer = post(gateway, "generate", headers={"Idempotency-Key": "a"})
    assert outcome_of(answer) == wanted


def test_a_call_to_a_group_that_was_shut_down_before_has_surely_not_run():
    with InProcessGroup(FakeCluster([1]), Generator, enable_load_balancing=True) as group:
        gateway = Gateway(group, METHODS)
    with gateway:
        assert outcome_of(post(gateway, "generate")) == (503, "surely not run")


def test_loggers_of_this_process_stay_as_they_are():
    loggers = [logging.getLogger(f"uvicorn.{name}") for name in ("access", "error")]
    before = [(one.propagate, one.level, one.handlers) for one in loggers]
    with Gateway(Lossy(0, None), ["generate"]):
        assert [(one.propagate, one.level, one.handlers) for one in loggers] == before


def test_arguments_are_an_object():
    assert arguments_of(b"") == {}
    assert arguments_of(b'{"a": 1}') == {"a": 1}
    for body in (b"{", b"1", b'{"timeout": 1}', b"[" * 100_000):
        with pytest.raises(CallError) as caught:
            arguments_of(body)
        assert caught.value.status == 400


def test_what_can_not_be_meant_is_refused():
    with InProcessGroup(FakeCluster([1]), Generator) as group, pytest.raises(ValueError, match="balancing"):
        Gateway(group, ["generate"])
    options = {"enable_load_balancing": True, "load_balancing_strategy": "consistent_hash"}
    with InProcessGroup(FakeCluster([1]), Generator, **options) as group:
        with pytest.raises(ValueError, match="key="):
            Gateway(group, ["generate"])
        for methods in ([], ["_private"], ["a b"]):
            with pytest.raises(ValueError, match="methods are"):
                Gateway(group, methods, key="header:a")
        for methods in ("generate", [7]):
            with pytest.raises(TypeError, match="methods are"):
                Gateway(group, methods, key="header:a")
