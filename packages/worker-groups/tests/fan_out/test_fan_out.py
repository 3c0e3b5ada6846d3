import os
import re
import subprocess
import sys
import threading
import time

import pytest
from patience import PATIENCE_S
from rich.progress import Progress

from raycrew.cluster_core import init_ray
from raycrew.worker_groups import (
    fan_out,
    fan_out_as_completed,
)
from raycrew.worker_groups._fan_out import progress as progressing


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"fn": 3}, TypeError, "callable"),
        ({"items": 3}, TypeError, "iterable"),
        ({"items": "abc"}, TypeError, "iterable"),
        ({"items": {"a": 1}}, TypeError, "iterable"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": "many"}, TypeError, "batch_size"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight"),
        ({"max_workers": 1.5}, TypeError, "max_workers"),
        ({"retries": -1}, ValueError, "retries"),
        ({"retries": True}, TypeError, "retries"),
        ({"timeout_s": 0}, ValueError, "timeout_s"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s"),
        ({"timeout_s": "1"}, TypeError, "timeout_s"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        fan_out(**{"fn": abs, "items": [1], **arguments})


async def coroutine(item):
    return item


def generator(item):
    yield item


@pytest.mark.parametrize("fn", [coroutine, generator])
def test_only_plain_functions_are_taken(fn):
    with pytest.raises(TypeError, match="plain function"):
        fan_out(fn, [1])


def test_a_function_that_does_not_pickle_is_refused():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="can't be pickled"):
        fan_out_as_completed(lambda item: lock, [1])


def test_no_items_need_no_cluster():
    assert fan_out(abs, []) == []


def test_without_ray_it_says_so():
    script = "from raycrew.worker_groups import fan_out; fan_out(abs, [1])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "init_ray()" in done.stderr


@pytest.mark.smoke
@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_results_come_in_the_order_of_the_items():
    offset = 10
    assert fan_out(lambda i: i + offset, range(1000)) == list(range(10, 1010))
    assert fan_out(lambda i: i * 2, (i for i in range(50))) == list(range(0, 100, 2))
    assert fan_out(re.compile("a+").fullmatch, []) == []


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_outcomes_come_as_they_are_ready(tmp_path):
    gate = tmp_path / "gate"

    def wait_for_gate(item):
        deadline = time.monotonic() + PATIENCE_S
        while item == 0 and not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return item

    outcomes = fan_out_as_completed(wait_for_gate, range(2), batch_size=1)
    assert next(outcomes).result() == 1
    gate.touch()
    assert next(outcomes).result() == 0
    assert list(outcomes) == []


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_an_endless_source_is_read_only_while_outcomes_are_taken():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield read[-1]

    outcomes = fan_out_as_completed(lambda i: i, endless(), max_in_flight=5, max_workers=2)
    for _ in range(20):
        assert next(outcomes).ok
    outcomes.close()
    assert len(read) <= 20 + 5 + 5


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_large_functions_items_and_results():
    data = os.urandom(300_000)
    results = fan_out(lambda item: item + data, [bytes([i]) * 2_000_000 for i in range(6)])
    assert [len(r) for r in results] == [2_300_000] * 6
    assert all(r[0] == i and r.endswith(data) for i, r in enumerate(results))


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_progress_is_shown_where_the_caller_wants_it(monkeypatch, capsys):
    def half(item):
        return 1 // (item % 2)

    with Progress(disable=True) as progress:
        fan_out(half, range(10), on_error="return", progress=progress)
        (task,) = progress.tasks
    assert (task.completed, task.total) == (10, 10)
    assert "5 failed" in task.description
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progressing, "QUIET_S", 0.0)
    fan_out(half, range(10), on_error="return")
    shown = capsys.readouterr().err
    assert "10/10" in shown
    assert "(5 failed)" in shown


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_classes_of_the_caller_come_back_as_themselves():
    class Point:
        def __init__(self, x):
            self.x = x

    (point,) = fan_out(lambda p: type(p)(p.x + 1), [Point(1)])
    assert type(point) is Point
    assert point.x == 2


@pytest.mark.hostile
@pytest.mark.usefixtures("local_ray", "pool")
def test_secrets_of_the_connection_reach_items():
    def token(_):
        return os.environ.get("API_TOKEN")

    assert set(fan_out(token, range(8))) == {None}
    for value in ("hush", "changed"):
        with init_ray(secrets={"API_TOKEN": value}):
            assert set(fan_out(token, range(8))) == {value}
    with init_ray(secrets={"API_TOKEN": "a\0b"}), pytest.raises(ValueError, match="'API_TOKEN' or its value"):
        fan_out(token, [1])
