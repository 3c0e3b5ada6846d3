import asyncio
import threading
import time

import pytest
from patience import eventually

from raycrew.cluster_core import Session
from raycrew.worker_groups import PhaseError, PhaseTimeoutError
from raycrew.worker_groups._group.phases.entrance import Entrance


def test_whoever_is_in_comes_in_again_and_leaves_as_often():
    entrance, me = Entrance(), object()
    assert entrance.enter(me, "train", None)
    assert not entrance.enter(me, "train", None)
    assert entrance.turn_of(me) == "train"
    assert entrance.is_about_to_leave(me) is None
    entrance.leave(me)
    assert entrance.is_about_to_leave(me) == "train"
    entrance.leave(me)
    assert entrance.turn_of(me) is None
    assert entrance.is_about_to_leave(me) is None


def test_within_a_turn_there_is_none_of_another_one():
    entrance, me = Entrance(), object()
    entrance.enter(me, "train", None)
    with pytest.raises(PhaseError, match="within a turn of 'train' there is none of 'generate'"):
        entrance.enter(me, "generate", None)
    entrance.leave(me)
    assert entrance.enter(me, "generate", None)


def test_who_waits_gives_up_at_its_deadline_and_is_in_nobodys_way():
    entrance, one, other = Entrance(), object(), object()
    entrance.enter(one, "train", None)
    with pytest.raises(
        PhaseTimeoutError, match="free for 'generate' in time: 'train' has its turn"
    ) as caught:
        entrance.enter(other, "generate", time.monotonic() + 0.02)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(PhaseError, match="block the event loop") as refused:
        entrance.enter(other, "generate", None, may_wait=False)
    assert not isinstance(refused.value, TimeoutError)
    entrance.leave(other)
    assert entrance.turn_of(one) == "train", "who is not in leaves nothing"
    entrance.leave(one)
    assert entrance.enter(other, "generate", time.monotonic(), may_wait=False), "a deadline is for waiting"


def test_first_come_first_served():
    entrance, came, threads = Entrance(), [], []
    entrance.enter("me", "train", None)

    def come(number):
        entrance.enter(number, "generate", time.monotonic() + 60)
        came.append(number)
        entrance.leave(number)

    for number in range(5):
        threads.append(threading.Thread(target=come, args=(number,), daemon=True))
        threads[-1].start()
        eventually(lambda count=number + 1: len(entrance._waiting) == count, "it waits")
    entrance.leave("me")
    for thread in threads:
        thread.join(60)
    assert came == list(range(5))


def test_a_wait_that_nobody_wants_any_more_ends():
    entrance, given_up = Entrance(), threading.Event()
    entrance.enter("me", "train", None)
    given_up.set()
    with Session.until_set(given_up), pytest.raises(asyncio.CancelledError):
        entrance.enter("other", "train", None)
    entrance.leave("me")
    assert entrance.enter("third", "train", time.monotonic())
