"""Who gets its turn when."""

import threading

import pytest
from forking import in_a_child

from raycrew.tensor_transport import TransportError, TransportTimeoutError
from raycrew.tensor_transport.weights._syncing.turns import Turns

pytestmark = pytest.mark.hostile


@pytest.fixture
def turns():
    return Turns("update goes over this route")


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_turns_come_in_the_order_in_which_they_were_asked_for(turns, timeout_s):
    had, threads = [], []

    def take(number, stands):
        with turns.turn(timeout_s, stands.set):
            had.append(number)

    with turns.turn(None):
        for number in range(5):
            stands = threading.Event()
            threads.append(threading.Thread(target=take, args=(number, stands), daemon=True))
            threads[-1].start()
            assert stands.wait(60)
    for thread in threads:
        thread.join(60)
    assert had == [0, 1, 2, 3, 4]
    assert not turns._tickets


def test_who_has_its_turn_and_asks_again_is_refused_at_once(turns):
    with turns.turn(None):
        with pytest.raises(TransportError, match="over this route in this very thread"), turns.turn(None):
            pass
        assert len(turns._tickets) == 1
    with turns.turn(0.0):
        pass


def test_a_thread_that_works_for_who_has_its_turn_is_refused_as_long_as_it_does(turns):
    found = []

    def work(turn):
        with turn.shared(), pytest.raises(TransportError, match="or waits for it"), turns.turn(None):
            pass
        with pytest.raises(TransportTimeoutError), turns.turn(0.0):
            pass
        found.append("refused")

    with turns.turn(None) as turn:
        thread = threading.Thread(target=work, args=(turn,), daemon=True)
        thread.start()
        thread.join(60)
    assert found == ["refused"]


def test_a_wait_ends_in_time_or_when_it_is_not_wanted_any_more(turns):
    def unwanted():
        raise KeyError("given up")

    with turns.turn(None):
        found = []

        def ask(timeout_s, check):
            try:
                with turns.turn(timeout_s, check):
                    found.append(None)
            except (TransportTimeoutError, KeyError) as error:
                found.append(error)

        for asked in ((0.01, None), (None, unwanted), (0.01, lambda: None)):
            thread = threading.Thread(target=ask, args=asked, daemon=True)
            thread.start()
            thread.join(60)
        late, dropped, again = found
        assert "another update goes over this route, and did not end within 0.01 s" in str(late)
        assert isinstance(dropped, KeyError)
        assert isinstance(again, TransportTimeoutError)
        assert len(turns._tickets) == 1


def test_a_forked_child_waits_for_no_thread_of_its_parent(turns):
    inside, go_on = threading.Event(), threading.Event()

    def take():
        with turns.turn(None):
            inside.set()
            assert go_on.wait(60)

    def has_a_turn():
        with turns.turn(20):
            return True

    thread = threading.Thread(target=take)
    thread.start()
    assert inside.wait(60)
    try:
        assert in_a_child(has_a_turn)
        with pytest.raises(TransportTimeoutError), turns.turn(0.01):
            raise AssertionError("it is not over here")
    finally:
        go_on.set()
        thread.join(60)
