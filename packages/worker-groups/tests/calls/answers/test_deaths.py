"""What is said of a worker that has died, by what is known of it; no Ray is needed."""

import pytest
from ray.exceptions import ActorDiedError

from raycrew.worker_groups._calls import Whereabouts, failure
from raycrew.worker_groups._health import Seen
from raycrew.worker_groups._health.reports import RunningCall

pytestmark = pytest.mark.hostile


def seen(*methods, is_told=True, is_alive=False):
    return Seen(is_alive, is_told, calls=tuple(RunningCall(name, 1, 1.0, 1.0) for name in methods))


def said(where, method="step", sight=None, elapsed_s=1.0):
    text = failure(where, ActorDiedError(), method, elapsed_s=elapsed_s, seen=sight).message
    return text.splitlines()[0].removeprefix("rank 0 of 'policy': ").removesuffix(f" after {elapsed_s:.1f} s")


@pytest.fixture
def where():
    return Whereabouts("policy", seat="rank 0 of 'policy'")


@pytest.mark.parametrize(
    ("sight", "text"),
    [
        (seen("step"), "died during step"),
        (seen("step", is_alive=True), "died during step"),  # it is still ending
        (seen("load", "step"), "died during step"),
        (seen("load"), "died during load, before it began step"),
        (seen(), "died while it was in no call, before it began step"),
        (seen(is_told=False), "was dead when step was called, or died during step"),
        (None, "was dead when step was called, or died during step"),
    ],
)
def test_the_call_in_which_it_died_is_named_where_it_is_known(where, sight, text):
    assert said(where, sight=sight).endswith(text)


def test_the_first_that_is_known_stays_known(where):
    assert said(where, "load", seen("load")).endswith("died during load")
    late = "was dead already when step was called: it died during load"
    assert said(where, sight=None, elapsed_s=0.0).endswith(late)
    assert said(where, "load", elapsed_s=1000.0).endswith("died during load"), "that was sent before"


def test_a_death_that_was_seen_by_a_look_was_before_later_calls(where):
    where.note_death(None)
    assert said(where, elapsed_s=0.0).endswith("was dead already when step was called")
    idle = Whereabouts("policy", seat="rank 0 of 'policy'")
    idle.note_death(seen())
    text = "was dead already when step was called: it died while it was in no call"
    assert said(idle, elapsed_s=0.0).endswith(text)


def test_a_long_name_is_compared_as_far_as_it_is_told(where):
    assert said(where, "x" * 100, seen("x" * 72)).endswith("died during " + "x" * 100)
