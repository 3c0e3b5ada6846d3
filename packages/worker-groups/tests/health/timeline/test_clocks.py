"""What the clocks of nodes show, from questions and their answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups._health.timeline.clocks import DRIFT, Clocks

TIMES = st.floats(0, 1e6, allow_nan=False)


@given(st.floats(-1e6, 1e6), TIMES, st.floats(0, 1), st.floats(0, 1))
def test_the_truth_lies_within_the_bound(ahead, asked, there_s, back_s):
    answered = asked + there_s
    found = Clocks("here").observe("n", "there", answered + ahead, asked, answered + back_s)
    assert abs(found.ahead_s - ahead) <= found.bound_s + 1e-6
    assert found.bound_s <= (there_s + back_s) / 2 + 1e-6


def test_the_shortest_round_trip_counts_until_clocks_may_have_drifted():
    clocks = Clocks("here")
    assert clocks.observe("n", "there", 105.0, 0.0, 2.0).ahead_s == 104.0
    assert clocks.observe("n", "there", 102.55, 2.0, 2.1).ahead_s == 100.5
    assert clocks.observe("n", "there", 110.0, 3.0, 5.0).ahead_s == 100.5, "a worse one"
    assert clocks.bounds() == {"n": (2.1 - 2.0) / 2}
    later = 2.1 + 1.0 / DRIFT
    assert clocks.observe("n", "there", later + 101.0, later - 1.0, later + 1.0).ahead_s == 101.0


@pytest.mark.hostile
def test_an_answer_before_its_question_is_refused_and_changes_nothing():
    clocks = Clocks("here")
    known = clocks.observe("n", "there", 105.0, 0.0, 2.0)
    with pytest.raises(ValueError, match=r"node n.*asked at 2.0 and has answered at 0.0"):
        clocks.observe("n", "there", 105.0, 2.0, 0.0)
    assert clocks.bounds() == {"n": 1.0}
    assert clocks.observe("n", "there", 110.0, 3.0, 3.5).ahead_s != known.ahead_s, "a better one is taken"


def test_whoever_shares_the_clock_is_not_ahead():
    clocks = Clocks("here")
    found = clocks.observe("n", "here", 17.0, 100.0, 200.0)
    assert (found.ahead_s, found.bound_s, found.bound_at(1e9)) == (0.0, 0.0, 0.0)
    assert clocks.observe("m", "there", 17.0, 16.0, 18.0).ahead_s == 0.0
    assert clocks.bounds() == {"n": 0.0, "m": 1.0}
