import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from patience import PATIENCE_S, eventually, is_running

from raycrew.worker_groups import FunctionLoadError, close_fan_out, fan_out, fan_out_as_completed
from raycrew.worker_groups._fan_out.processes.code import KEPT, Code, Function, Kept, Library, UnloadableError
from raycrew.worker_groups._fan_out.warm_pool.pool import Pool

pytestmark = pytest.mark.hostile

MODEL = None


def load_model():
    global MODEL
    MODEL = f"loaded in {os.getpid()}"


def with_model(item):
    return (item, f"loaded in {os.getpid()}" == MODEL)


def note(folder, text):
    with (folder / str(os.getpid())).open("a") as file:
        file.write(text)


def runs(folder):
    return {int(path.name): path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(("fn", "initializer"), [(abs, 3), (abs, "load")])
def test_an_initializer_that_is_none_is_refused(fn, initializer):
    with pytest.raises(TypeError, match="initializer must be callable"):
        fan_out(fn, [1], initializer=initializer)


def test_an_initializer_that_does_not_pickle_is_refused():
    with pytest.raises(TypeError, match="can't be pickled"):
        fan_out(abs, [1], initializer=partial(print, sys.stdout))


@pytest.mark.usefixtures("local_ray", "pool")
def test_the_pool_can_be_asked_for_ahead(tmp_path):
    def initializer():
        note(tmp_path, ".")

    def own_pid(item):
        return os.getpid()

    assert fan_out(own_pid, [], initializer=initializer, warm=True, max_workers=2) == []
    eventually(lambda: [*runs(tmp_path).values()] == [".", "."], "two have loaded it, and no item was sent")
    ahead = runs(tmp_path)
    used = set(fan_out(own_pid, range(8), initializer=initializer, max_workers=2))
    assert used <= ahead.keys() and runs(tmp_path) == ahead, "nobody else has, and none of them again"


def hang(folder):
    note(folder, ".")
    while not (folder.parent / "open").exists():
        time.sleep(0.01)


def interrupted(use):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which who runs this may ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            list(use(threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start))
    finally:
        signal.signal(signal.SIGINT, before)


def cancelled(use):
    async def take():
        async for _ in use():
            pass

    async def give_up():
        taking = asyncio.create_task(take())
        await asyncio.sleep(0.3)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking

    asyncio.run(give_up())


@pytest.mark.usefixtures("local_ray", "pool")
def test_what_was_asked_for_ahead_is_given_up_with_the_call_that_waits_for_it(tmp_path):
    (folder := tmp_path / "runs").mkdir()
    load = partial(hang, folder)

    def items(begun):
        begun()
        yield -1

    def use(begun=lambda: None):
        return fan_out_as_completed(abs, items(begun), initializer=load, max_workers=2)

    for give_up in (interrupted, cancelled):
        fan_out(abs, [], initializer=load, warm=True, max_workers=2)
        eventually(lambda: sum(map(is_running, runs(folder))) == 2, "both hang")
        give_up(use)
        eventually(lambda: not any(map(is_running, runs(folder))), "they are gone")
    (tmp_path / "open").touch()
    assert [outcome.value for outcome in use()] == [1]


@pytest.mark.usefixtures("local_ray", "pool")
def test_asking_ahead_that_is_interrupted_asks_for_nothing(tmp_path, monkeypatch):
    (folder := tmp_path / "runs").mkdir()

    def stopped(self, numbers=itertools.count(1)):  # noqa: B008
        if (number := next(numbers)) == 2:
            eventually(lambda: runs(folder), "the first one hangs")
            raise KeyboardInterrupt
        return number

    monkeypatch.setattr(Pool, "next_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        fan_out(abs, [], initializer=partial(hang, folder), warm=True, max_workers=2)
    (pid,) = runs(folder)
    eventually(lambda: not is_running(pid), "it is gone")
    assert fan_out(abs, [-1], max_workers=2) == [1]


def test_what_is_asked_for_ahead_has_no_items():
    for items in ([1], iter([])):
        with pytest.raises(ValueError, match="runs no items"):
            fan_out(abs, items, warm=True)


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_it_runs_once_in_each_process_for_many_calls_and_functions(tmp_path):
    def initializer():
        note(tmp_path, ".")

    pids = set()
    for offset in range(3):
        pids |= set(
            fan_out(lambda i, offset=offset: (offset, os.getpid())[1], range(40), initializer=initializer)
        )
    assert runs(tmp_path).keys() >= pids
    assert set(runs(tmp_path).values()) == {"."}


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_the_function_finds_what_the_initializer_has_set():
    assert fan_out(with_model, range(40), initializer=load_model) == [(i, True) for i in range(40)]
    state = {}

    def initializer():
        state["scale"] = 3

    assert fan_out(lambda i: i * state["scale"], range(4), initializer=initializer) == [0, 3, 6, 9]
    assert fan_out(lambda i: i + state["scale"], range(4), initializer=initializer) == [3, 4, 5, 6]


SCRIPT = """
import os, sys, ray
from raycrew.worker_groups import fan_out
MODEL = None

def load():
    global MODEL
    MODEL = [os.getpid()]

def helper():
    return MODEL

def score(item):
    helper().append(item)
    return MODEL[0] == os.getpid()

def later(item):
    return len(MODEL) > 1

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
assert all(fan_out(score, range(20), initializer=load, max_workers=1))
assert all(fan_out(later, range(20), initializer=load, max_workers=1))
"""


def test_globals_of_the_main_script_are_found_and_stay(local_ray, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), local_ray], capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("local_ray", "warm_pool")
@pytest.mark.parametrize("fails", ["raises", "exits", "ends the process"])
def test_its_failure_is_one_error_that_says_why(fails):
    def initializer():
        if fails == "raises":
            raise OSError("no such model")
        if fails == "exits":
            sys.exit("no such model")
        os._exit(9)

    says = (
        "exited with code 9 while it ran the initializer" if fails == "ends the process" else "no such model"
    )
    with pytest.raises(FunctionLoadError, match=says) as caught:
        fan_out(abs, range(100), initializer=initializer)
    assert "initializer" in str(caught.value)
    assert fan_out(abs, [-1]) == [1]


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_after_a_failure_it_is_tried_again(tmp_path):
    marker = tmp_path / "there"

    def initializer():
        marker.read_text()

    with pytest.raises(FunctionLoadError, match="FileNotFoundError"):
        fan_out(abs, [-1], initializer=initializer)
    marker.touch()
    assert fan_out(abs, [-1], initializer=initializer) == [1]


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_its_time_is_not_charged_to_the_items():
    def initializer():
        time.sleep(3.0)

    assert fan_out(abs, [-1, -2], initializer=initializer, timeout_s=2.0) == [1, 2]


class Model:
    """Large, and slow to load; notes where it is."""

    def __init__(self, folder, seconds=0.0, size=20_000_000):
        self.folder, self.seconds, self.weights = folder, seconds, bytes(size)

    def __setstate__(self, state):
        vars(self).update(state)
        note(self.folder, ".")
        time.sleep(self.seconds)


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_nor_is_the_time_that_a_function_takes_to_load(tmp_path):
    model = Model(tmp_path, seconds=3.0)
    found = fan_out(lambda _: len(model.weights), range(4), timeout_s=2.0)
    assert found == [20_000_000] * 4
    assert set(runs(tmp_path).values()) == {"."}


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_what_it_holds_reaches_each_process_once(tmp_path):
    model, state = Model(tmp_path), {}

    def initializer():
        state["size"] = len(model.weights)

    for factor in range(3):
        found = fan_out(lambda item, by=factor: item + by * state["size"], [0, 1], initializer=initializer)
        assert found == [factor * 20_000_000, 1 + factor * 20_000_000]
    assert set(runs(tmp_path).values()) == {"."}


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_one_that_forks_and_lets_its_child_return_runs_no_item_twice(tmp_path):
    def initializer():
        os.fork()

    def count(item):
        note(tmp_path, "x")
        return item

    assert fan_out(count, range(40), initializer=initializer) == list(range(40))
    assert sum(map(len, runs(tmp_path).values())) == 40


@pytest.mark.usefixtures("local_ray")
def test_what_it_starts_lives_on_from_item_to_item_and_ends_with_the_pool():
    state = {}

    def initializer():
        state["helper"] = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def helper(item):
        subprocess.Popen(["sleep", "1000"])
        return state["helper"].pid, state["helper"].poll()

    found = set(fan_out(helper, range(6), initializer=initializer, max_workers=1))
    assert len(found) == 1
    ((pid, status),) = found
    assert status is None
    close_fan_out()
    assert not is_running(pid)


def test_a_process_keeps_the_latest_used():
    kept = Kept()
    for n in range(KEPT):
        kept.use(str(n), n)
    kept.use("0", 0)
    kept.use("new", -1)
    assert list(kept) == [*map(str, range(2, KEPT)), "0", "new"]


def without_data(code):
    return Code(code.key, None)


def test_a_library_loads_each_piece_once_and_hands_on_what_was_set():
    seen = []
    state = {"seen": 0}

    def initializer():
        state["seen"] += 1

    library = Library()
    first = Function(lambda item: (item, state["seen"]), initializer)
    second = Function(lambda item: (-item, state["seen"]), initializer)
    assert first.initializer.key == second.initializer.key
    assert first.code.key != second.code.key
    library.initialize(first.initializer)
    library.initialize(without_data(second.initializer))
    seen.append(library.load(first.code, first.initializer)(1))
    seen.append(library.load(second.code, second.initializer)(1))
    seen.append(library.load(without_data(first.code), first.initializer)(2))
    assert seen == [(1, 1), (-1, 1), (2, 1)]
    assert state == {"seen": 0}
    assert Function(abs).initializer is None


def test_the_same_function_with_another_initializer_is_another():
    assert Function(abs, load_model).code.key != Function(abs).code.key


def test_what_can_not_be_loaded_says_why():
    library = Library()
    with pytest.raises(UnloadableError, match="UnpicklingError"):
        library.load(Code("bad", b"\x00"), None)
    with pytest.raises(UnloadableError, match="UnpicklingError"):
        library.initialize(Code("bad", b"\x00"))


@pytest.mark.usefixtures("local_ray", "warm_pool")
def test_one_that_is_killed_says_by_what():
    with pytest.raises(FunctionLoadError, match="SIGTERM"):
        fan_out(abs, [-1], initializer=lambda: os.kill(os.getpid(), signal.SIGTERM), timeout_s=0.5)
