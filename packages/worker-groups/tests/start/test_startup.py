"""What the error of a start-up says of those that were not done yet."""

from types import SimpleNamespace

import pytest

from raycrew.worker_groups import RankInfo, WorkerFailureError
from raycrew.worker_groups._calls.answers.failures import Whereabouts
from raycrew.worker_groups._calls.answers.waiting import Settled
from raycrew.worker_groups._start.startup import Launch

RANK = RankInfo(4, 8, 0, 4, 1, "n", "10.0.0.1", 2, None, "10.0.0.1", 7000, (), "g")


def failed(*infos):
    """The error where the first worker failed, and the others, at positions from 7 on, are not done."""
    launch = SimpleNamespace(
        go_on=SimpleNamespace(look=lambda: None), positions=range(7, 20), _told=lambda error, _: error
    )
    places = [Whereabouts("g", info=info, seat=f"worker {i}") for i, info in enumerate((None, *infos))]
    settled = Settled(
        errors={0: ValueError("wrong")}, pending=list(range(1, len(places))), elapsed_s={0: 1.0}
    )
    with pytest.raises(WorkerFailureError) as caught:
        Launch._raise_failed(launch, settled, places)
    return caught.value


def test_those_that_have_no_rank_yet_are_told_by_none():
    error = failed(None, None)
    assert error.pending == () and "not done yet" not in str(error)
    error = failed(None, RANK)
    assert error.pending == (4,) and "not done yet when this was raised: ranks [4]" in str(error)
