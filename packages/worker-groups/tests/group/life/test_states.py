import asyncio
import linecache
import os
import sys
import threading
from contextlib import nullcontext

import pytest

from raycrew.cluster_core import Session
from raycrew.worker_groups import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups._calls import Recovery
from raycrew.worker_groups._group.life import once, states
from raycrew.worker_groups._group.life.states import Lifecycle

pytestmark = pytest.mark.hostile


class Told:
    """Something that goes on in a thread until it is told to end."""

    def __init__(self, run, outcome):
        self._began, self._may_end, self._outcome = threading.Event(), threading.Event(), outcome
        self.results = []
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()
        assert self._began.wait(60)

    def _run(self, run):
        try:
            self.results.append(run(self._work))
        except Exception as error:  # noqa: BLE001
            self.results.append(error)

    def _work(self):
        self._began.set()
        assert self._may_end.wait(60)
        return self._outcome()

    def end(self):
        self._may_end.set()
        self._thread.join(60)
        return self.results[0]


@pytest.fixture
def life():
    return opened()


def in_thread(call):
    results = []

    def run():
        try:
            results.append(call())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end():
        thread.join(60)
        assert not thread.is_alive()
        return results[0]

    return thread, end


def never():
    raise AssertionError("this must not be done")


def fail():
    raise ValueError("no luck")


@pytest.fixture
def joined(life, monkeypatch):
    """Set once a second thread has found the restart of another."""
    found, refuse_own = threading.Event(), life._refuse_own
    monkeypatch.setattr(life, "_refuse_own", lambda what: (refuse_own(what), found.set()))
    return found


def test_a_second_restart_has_the_outcome_of_the_first(life, joined):
    first = Told(life.restart, lambda: [2, 3])
    assert life.state == "restarting"
    _, second = in_thread(lambda: life.restart(never))
    assert joined.wait(60)
    assert first.end() == second() == [2, 3]
    assert life.state == "open"


def test_so_it_has_its_failure(life, joined):
    first = Told(life.restart, fail)
    _, second = in_thread(lambda: life.restart(never))
    assert joined.wait(60)
    assert isinstance(first.end(), ValueError)
    assert second() is first.end()
    assert life.state == "open"
    assert life.restart(lambda: [1]) == [1]


def test_calls_on_ranks_that_are_replaced_wait_and_others_go_on(life):
    restart = Told(life.restart, lambda: [1])
    life.replacing([1])
    life.await_replaced([0, 2], None)
    with pytest.raises(ResultTimeoutError, match=r"ranks \[1\] are still being restarted") as late:
        life.await_replaced([0, 1], 0.01)
    assert late.value.pending == (1,)
    _, waited = in_thread(lambda: life.await_replaced([1], 60))
    restart.end()
    assert waited() is None
    life.await_replaced([1], None)


def test_a_call_that_meets_one_restart_after_another_waits_no_longer_than_its_time(life, monkeypatch):
    restart, until, await_replaced = Told(life.restart, lambda: [1]), [], life.await_replaced
    life.replacing([1])

    def await_one_of_three(ranks, timeout_s, deadline):
        until.append(deadline)
        if len(until) == 3:
            await_replaced(ranks, timeout_s, deadline - timeout_s)

    monkeypatch.setattr(life, "await_replaced", await_one_of_three)
    with (
        pytest.raises(ResultTimeoutError, match="are still being restarted after 60 s"),
        life.sending([1], 60),
    ):
        pass
    assert len(set(until)) == 1 and None not in until
    restart.end()


def test_what_is_being_sent_is_sent_before_its_rank_is_replaced(life):
    sent, may_send, began = [], threading.Event(), threading.Event()

    def send():
        with life.sending([0, 1], None):
            began.set()
            assert may_send.wait(60)
            sent.append("a call")

    def work():
        _, sending = in_thread(send)
        assert began.wait(60)
        threading.Timer(0.05, may_send.set).start()
        life.replacing([1])
        told = list(sent)
        sending()
        return told

    assert life.restart(work) == ["a call"]
    with life.sending([1], None):
        pass


def test_a_call_that_is_not_sent_in_the_end_holds_up_no_restart_for_ever(life, monkeypatch, caplog):
    monkeypatch.setattr(states, "UNWIND_S", 0.02)
    with life.sending([1], None):
        life.replacing([1])
    assert "its restart goes on while calls are still being sent" in caplog.text


def test_who_wants_its_own_restart_gets_it_after_that_of_another(life, joined):
    other = Told(lambda work: life.restart(work, shared=False), lambda: [1])
    _, own = in_thread(lambda: life.restart(lambda: [2], shared=False))
    assert joined.wait(60)
    assert (other.end(), own()) == ([1], [2])


def test_a_restart_apart_does_not_hold_up_the_end_of_the_program(life):
    assert life.restart(lambda: [int(threading.current_thread().daemon)], apart=True) == [1]


def test_a_restart_that_calls_its_own_group_is_no_deadlock(life):
    def work():
        life.replacing([0])
        with pytest.raises(WorkerGroupError, match="can't be called"):
            life.await_replaced([0], None)
        life.await_replaced([1], None)
        with pytest.raises(WorkerGroupError, match="can't be restarted"):
            life.restart(never)
        return [0]

    assert life.restart(work) == [0]


def test_a_copy_waits_no_longer_than_it_may_for_a_restart_that_does_not_end(life):
    restart = Told(life.restart, lambda: [1])
    life.replacing([1])
    with (
        pytest.raises(ResultTimeoutError, match=r"ranks \[1\] are still being restarted after 0"),
        life.copying([0, 1], 0.01),
    ):
        pass
    restart.end()


def test_what_is_known_of_ranks_is_copied_before_or_after_they_are_replaced(life):
    def copy(ranks):
        with life.copying(ranks, 60):
            return "copied"

    restart = Told(life.restart, lambda: [1])
    life.replacing([1])
    assert copy([0, 2]) == "copied"
    waiting, copied = in_thread(lambda: copy([0, 1]))
    waiting.join(0.1)
    assert waiting.is_alive()
    restart.end()
    assert copied() == "copied"

    def work():
        life.replacing([0])
        return copy([0])  # by the restart itself, which nobody waits for

    assert life.restart(work) == "copied"
    assert life.close(lambda: True)
    assert copy([0]) == "copied", "as something that has ended"


def test_closing_ends_a_restart_first_and_then_all_are_refused(life):
    done = []

    def given_up():
        life.check()

    restart = Told(life.restart, given_up)
    thread, closed = in_thread(lambda: life.close(lambda: done.append(life.state) or True))
    while life.state != "closing":
        thread.join(0.001)
    assert not done
    assert isinstance(restart.end(), WorkerGroupClosedError)
    assert (closed(), done, life.state) == (True, ["closing"], "closed")
    for refused in (life.check, lambda: life.restart(never)):
        with pytest.raises(WorkerGroupClosedError, match="'policy' was shut down"):
            refused()


@pytest.mark.hostile
def test_who_closes_within_the_close_does_not_wait_for_it(life):
    """As a signal handler does, or a clean-up that shuts down."""
    inner = []
    assert life.close(lambda: inner.append(life.close(never)) or True)
    assert inner == [False]
    assert life.close(never)


def test_several_that_close_wait_for_the_one_that_does(life):
    first = Told(life.close, lambda: False)
    with pytest.raises(WorkerGroupClosedError):
        life.check()
    others = [in_thread(lambda: life.close(never)) for _ in range(3)]
    assert all(thread.is_alive() for thread, _ in others)
    assert first.end() is False
    assert all(end() is False for _, end in others)
    assert life.close(never) is False


def test_what_was_left_is_ended_by_whoever_comes_later(life):
    assert life.close(lambda: False, lambda: True) is False
    assert life.close(lambda: True, lambda: True) is True
    assert life.close(never, lambda: False) is True


def test_a_failing_end_is_told_to_all_and_closes(life):
    first = Told(life.close, fail)
    _, second = in_thread(lambda: life.close(never))
    error = first.end()
    assert isinstance(error, ValueError)
    assert second() in (error, False)
    assert life.state == "closed"


def test_an_interrupted_restart_leaves_nobody_waiting(life):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        life.restart(interrupted)
    assert life.state == "open"


def test_a_restart_apart_whose_thread_begins_after_its_end_is_none(life, monkeypatch, caplog):
    """Who began it was interrupted as the thread was started, which comes to it only then."""
    start, run, is_over, has_looked = (
        threading.Thread.start,
        life._run_there,
        threading.Event(),
        threading.Event(),
    )

    def start_and_be_interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    def run_late(*given):
        assert is_over.wait(60)
        try:
            run(*given)
        finally:
            has_looked.set()

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_be_interrupted)
        patched.setattr(life, "_run_there", run_late)
        with pytest.raises(KeyboardInterrupt):
            life.restart(never, apart=True)
    is_over.set()
    assert has_looked.wait(60) and not caplog.text
    assert (life.state, life.restart(lambda: [1], apart=True)) == ("open", [1])


def given_up(wait):
    """The outcome of a wait that is given up once it goes on."""
    nobody_wants_it = threading.Event()

    def run():
        with Session.until_set(nobody_wants_it):
            return wait()

    thread, end = in_thread(run)
    thread.join(0.01)
    assert thread.is_alive()
    nobody_wants_it.set()
    return end()


def test_a_restart_apart_goes_on_when_who_began_it_gives_up(life, joined):
    begun, may_end = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert may_end.wait(60)
        Session.check_wanted()
        return [1]

    assert isinstance(given_up(lambda: life.restart(work, apart=True)), asyncio.CancelledError)
    assert begun.wait(60)
    _, other = in_thread(lambda: life.restart(never, apart=True))
    assert joined.wait(60)
    assert isinstance(given_up(lambda: life.restart(never, apart=True)), asyncio.CancelledError)
    may_end.set()
    assert other() == [1]
    assert life.state == "open"


def test_a_restart_apart_looks_itself_after_one_that_somebody_asked_for(life, joined):
    asked_for = Told(life.restart, list)
    _, own = in_thread(lambda: life.restart(lambda: [1], apart=True))
    assert joined.wait(60)
    assert asked_for.end() == []
    assert own() == [1]


def test_a_call_that_waits_for_a_restart_can_be_given_up(life):
    restart = Told(life.restart, lambda: [1])
    life.replacing([1])
    assert isinstance(given_up(lambda: life.await_replaced([1], None)), asyncio.CancelledError)
    assert restart.end() == [1]


def test_a_call_that_makes_an_event_loop_wait_for_a_restart_says_so(life, caplog):
    async def call():
        life.await_replaced([1], 0.01)

    restart = Told(life.restart, lambda: [1])
    life.replacing([1])
    with pytest.raises(ResultTimeoutError):
        asyncio.run(call())
    assert "blocks the event loop; asyncio.to_thread(group.call, ...) does not" in caplog.text
    caplog.clear()
    with pytest.raises(ResultTimeoutError):
        life.await_replaced([1], 0.01)
    assert not caplog.text
    restart.end()


def test_a_pause_can_be_given_up(life):
    assert isinstance(given_up(lambda: life.pause(60)), asyncio.CancelledError)


def test_a_failing_restart_apart_is_told_and_the_next_one_is_another(life):
    for _ in range(20):
        with pytest.raises(ValueError, match="no luck"):
            life.restart(fail, apart=True)
        assert life.restart(lambda: [1], apart=True) == [1]


def test_a_call_whose_group_another_thread_restarts_can_be_given_up():
    begun, may_end = threading.Event(), threading.Event()

    def restart(error):
        begun.set()
        return may_end.wait(60) and False

    recovery, error = Recovery(restart), WorkerFailureError("it died", rank=0, pid=1)
    _, first = in_thread(lambda: recovery.after(error, lambda: True))
    assert begun.wait(60)
    assert isinstance(given_up(lambda: recovery.after(error, lambda: True)), asyncio.CancelledError)
    may_end.set()
    assert first() is None


@pytest.mark.parametrize(("first", "second"), [("restart", "renew"), ("renew", "restart")])
def test_who_asks_for_something_else_than_what_goes_on_gets_it_afterwards(life, joined, first, second):
    other = Told(lambda work: life.restart(work, first), lambda: [1])
    _, own = in_thread(lambda: life.restart(lambda: [2], second))
    assert joined.wait(60)
    assert (other.end(), own()) == ([1], [2])


def interrupted(run, n_lines):
    """Whether `run` was interrupted, as by Ctrl-C, at the n-th line of these modules that it comes to."""
    left, last = n_lines, {}

    def trace(frame, event, arg):
        nonlocal left
        if event == "line" and frame.f_code.co_filename in (states.__file__, once.__file__):
            is_end_of_with = frame.f_lineno < last.get(id(frame), 0) and is_with(frame)
            last[id(frame)] = frame.f_lineno
            left -= not is_end_of_with  # where a lock is given back no signal is heard
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


def is_with(frame):
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def replaced(life, *, apart):
    def work():
        life.replacing([0])
        return [0]

    return life.restart(work, apart=apart)


def called(life):
    with life.sending([0, 1], 60):
        pass


def copied(life):
    with life.copying([0, 1], 60):
        pass


@pytest.mark.parametrize(
    "run",
    [
        lambda life: replaced(life, apart=False),
        lambda life: replaced(life, apart=True),
        called,
        copied,
    ],
    ids=["restart", "apart", "call", "copy"],
)
def test_what_is_interrupted_at_any_moment_keeps_nobody_waiting(run, monkeypatch, caplog):
    monkeypatch.setattr(states, "UNWIND_S", 5.0)
    n_lines = 0
    while True:
        life, n_lines = opened(), n_lines + 1
        if not interrupted(lambda: run(life), n_lines):  # noqa: B023
            break
        _, again = in_thread(lambda: replaced(life, apart=True))  # noqa: B023
        assert again() == [0], n_lines
        _, call = in_thread(lambda: called(life))  # noqa: B023
        assert (call(), life.state, life.replaced) == (None, "open", frozenset()), n_lines
        assert life.close(lambda: True)
    assert n_lines > 5
    assert not caplog.text, "nobody was waited for in vain"


def test_an_end_that_is_interrupted_at_any_moment_is_made_by_who_comes_later():
    n_lines = 0
    while True:
        life, ends, n_lines = opened(), [], n_lines + 1
        if not interrupted(lambda: life.close(lambda: ends.append(1) or True), n_lines):  # noqa: B023
            break
        assert life.close(lambda: ends.append(2) or True) is True, n_lines  # noqa: B023
        assert ends in ([1], [2], [1, 2]), n_lines
        with pytest.raises(WorkerGroupClosedError):
            life.check()
    assert n_lines > 5


def test_an_end_that_is_interrupted_while_a_restart_gives_up_is_made_by_who_waits_for_it(life):
    def interrupt(futures, timeout_s):
        _, others = in_thread(lambda: life.close(lambda: True))
        ended.append(others)
        raise KeyboardInterrupt

    ended = []
    restart = Told(life.restart, list)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(states, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            life.close(never)
    restart.end()
    assert (ended[0](), life.state) == (True, "closed")


def test_a_forked_process_waits_for_nothing_and_ends_nothing(life):
    restart = Told(life.restart, list)
    refused = []

    def child():
        for use in (life.check, lambda: life.restart(never)):
            try:
                use()
            except WorkerGroupClosedError as error:
                refused.append("forked from" in str(error))
        return refused == [True] * 2 and life.close(never) is False

    with life._lock, _threads_are_no_matter():  # as another thread may have it
        pid = os.fork()
        if pid == 0:
            os._exit(0 if child() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert restart.end() == []


def _threads_are_no_matter():
    return pytest.warns(DeprecationWarning) if sys.version_info >= (3, 12) else nullcontext()


def opened():
    made = Lifecycle("policy")
    made.opened()
    return made
