"""When the failure of a rank is told of."""

import pytest

from raycrew.tensor_transport._ray.answers import answered
from raycrew.tensor_transport.testing._fakes import LocalResults


class Supervised:
    """Results of a group that does something about a failure before it raises."""

    def __init__(self, failure, results):
        self.failure, self.results, self.events, self.limits = failure, results, [], []

    def exception(self, *, timeout=None):
        self.limits.append(timeout)
        return self.failure

    def get_results(self, *, timeout=None):
        self.limits.append(timeout)
        self.events.append("replaced")
        if self.results is None:
            raise self.failure
        return self.results


def test_what_is_there_is_given():
    assert answered(LocalResults([1, 2]), 1.0, pytest.fail) == [1, 2]
    assert answered(Supervised(None, [3]), None, pytest.fail) == [3]


@pytest.mark.parametrize("results", [None, ["of a call that was sent again"]])
def test_a_failure_is_told_before_anything_is_done_about_it(results):
    lost = RuntimeError("lost")
    answer = Supervised(lost, results)
    if results is None:
        with pytest.raises(RuntimeError, match="lost"):
            answered(answer, 5.0, answer.events.append)
    else:
        assert answered(answer, 5.0, answer.events.append) == results
    assert answer.events == [lost, "replaced"]


def test_what_is_left_of_a_deadline_is_for_the_results():
    answer = Supervised(None, [])
    answered(answer, 1e6, pytest.fail)
    first, second = answer.limits
    assert first == 1e6
    assert 0.9e6 < second <= 1e6


def test_without_a_deadline_none_is_set():
    answer = Supervised(None, [])
    answered(answer, None, pytest.fail)
    assert answer.limits == [None, None]


def test_no_time_is_left_once_it_has_been_waited_for_longer():
    answer = Supervised(None, [])
    answered(answer, -1.0, pytest.fail)
    assert answer.limits[1] == 0.0
