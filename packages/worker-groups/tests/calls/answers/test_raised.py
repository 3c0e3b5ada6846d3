"""What workers raise arrives as what it was, however hard it is to send or to tell."""

import copyreg
import threading

import pytest
from ray import cloudpickle
from workers import KeywordOnlyError, LockedError, RenamedError, Thrower

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError
from raycrew.worker_groups.testing import InProcessGroup

pytestmark = pytest.mark.hostile


@pytest.fixture(scope="module")
def group(local_ray_session):
    with (
        connected(local_ray_session),
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Thrower) as made,
    ):
        yield made


def test_what_can_not_be_pickled_as_it_is_keeps_its_type(group):
    with pytest.raises(WorkerFailureError, match="KeywordOnlyError: code 3") as caught:
        group.call("throw", "keyword").get_results()
    assert (type(caught.value.cause), caught.value.cause.code) == (KeywordOnlyError, 3)
    with pytest.raises(WorkerFailureError, match="RenamedError") as caught:
        group.call("throw", "renamed").get_results()
    assert (type(caught.value.cause), caught.value.cause.path) == (RenamedError, "/there")
    assert caught.value.cause.errno == 5
    with pytest.raises(WorkerFailureError, match="LockedError: held") as caught:
        group.call("throw", "locked").get_results()
    assert type(caught.value.cause) is LockedError
    with pytest.raises(WorkerFailureError, match="KeywordOnlyError: code 3") as caught:
        list(group.stream("stream", "keyword"))
    assert type(caught.value.cause) is KeywordOnlyError


def test_so_does_what_init_raises(group):
    with (
        RayVirtualCluster([1], use_gpus=False) as own,
        pytest.raises(WorkerFailureError, match="KeywordOnlyError: code 1") as caught,
    ):
        RayWorkerGroup(own, Thrower, at_once=True)
    assert type(caught.value.cause) is KeywordOnlyError


def check_told(group):
    with pytest.raises(WorkerFailureError, match="ValueError: odd notes 5"):
        group.call("throw", "noted").get_results()
    with pytest.raises(WorkerFailureError, match="throw raised"):
        group.call("throw", "speechless").get_results()


def test_odd_notes_and_texts_do_not_hide_a_failure(group):
    check_told(group)


def test_nor_in_process():
    with InProcessGroup(FakeCluster([1]), Thrower) as group:
        check_told(group)


def test_what_pickle_brings_back_is_left_alone():
    from raycrew.worker_groups._worker import as_portable

    error = ValueError("fine")
    assert as_portable(error) is error
    assert ValueError not in copyreg.dispatch_table


def test_parts_that_can_not_travel_become_text():
    from raycrew.worker_groups._worker import as_portable

    error = LockedError("held")
    error.other, error.__cause__ = [1, 2], KeyError("why")
    back = cloudpickle.loads(cloudpickle.dumps(as_portable(error)))
    assert (type(back), back.args, back.other) == (LockedError, ("held",), [1, 2])
    assert isinstance(back.lock, str)
    assert isinstance(error.lock, type(threading.Lock()))
