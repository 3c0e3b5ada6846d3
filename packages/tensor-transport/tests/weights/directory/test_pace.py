"""When something is said again."""

import math

import pytest

from raycrew.tensor_transport.weights._directory.pace import Pace


@pytest.mark.parametrize(
    ("took_s", "silent_s"),
    [(0.0, 0.003), (0.002, 0.003), (0.01, 0.01), (0.5, 0.5), (3600.0, 1.0), (math.inf, 1.0)],
)
def test_the_longer_an_answer_takes_the_later_is_the_next_one_up_to_a_second(took_s, silent_s):
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert not pace.is_silent()
    pace.said(took_s)
    now[0] += 0.99 * silent_s
    assert pace.is_silent()
    now[0] += 0.02 * silent_s
    assert not pace.is_silent()


def test_what_needs_no_answer_is_said_after_a_moment_again():
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.said()
    assert pace.is_silent()
    now[0] = 0.0031
    assert not pace.is_silent()
