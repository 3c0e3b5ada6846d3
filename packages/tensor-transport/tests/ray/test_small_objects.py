"""Small objects that are waited for beside the main thread: what Ray told of them is what they are."""

import contextlib
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from raycrew.tensor_transport._ray import objects, waiting


class Reference:
    def __init__(self):
        self.told = Future()

    def future(self):
        return self.told


@pytest.fixture
def got(monkeypatch):
    """What is got of Ray itself, with how many seconds left."""
    found = []
    monkeypatch.setattr(objects, "is_beside", lambda: True)
    monkeypatch.setattr(objects, "get", lambda ref, left_s, session: found.append(left_s) or "got")
    monkeypatch.setattr(waiting, "no_shutdown", contextlib.nullcontext)
    return found


SESSION = SimpleNamespace(check=lambda: None)


@pytest.mark.parametrize("answer", [3, None])
def test_what_ray_told_of_is_not_read_again(got, answer):
    ref = Reference()
    ref.told.set_result(answer)
    assert objects.get_small(ref, 60.0, SESSION) == answer
    assert not got


@pytest.mark.hostile
def test_ray_itself_says_what_is_wrong(got):
    ref = Reference()
    ref.told.set_exception(RuntimeError("lost"))
    assert objects.get_small(ref, 60.0, SESSION) == "got"
    assert 0 < got[0] <= 60


@pytest.mark.hostile
def test_what_does_not_come_is_late(got):
    assert objects.get_small(Reference(), 0.01, SESSION) == "got"
    assert got == [0.0]


def test_the_main_thread_is_interrupted_by_ray_itself(got, monkeypatch):
    monkeypatch.setattr(objects, "is_beside", lambda: False)
    assert objects.get_small(Reference(), 60.0, SESSION) == "got"
    assert got == [60.0]
