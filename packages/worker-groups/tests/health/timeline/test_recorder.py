"""What is told of calls is noted, put together and told to listeners."""

import enum
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from timeline_calls import any_calls

from raycrew.worker_groups._health.observers import Span, observed
from raycrew.worker_groups._health.timeline import recorder as module
from raycrew.worker_groups._health.timeline.kept import Kept
from raycrew.worker_groups._health.timeline.ledger import Ran
from raycrew.worker_groups._health.timeline.recorder import Recorder
from raycrew.worker_groups._health.timeline.records import Call, Part

CALL = b"a" * 24


class Told:
    """Listens, and writes down what it is told; workers that tell what they are given."""

    wants = "now"

    def __init__(self):
        self.n_left_out = 0
        self.calls, self.spans, self.counts, self.looks = [], [], [], []
        self.followed, self.ran = [], []
        self.asked = lambda: None

    def left_out(self):
        self.n_left_out += 1

    def call(self, call):
        self.calls.append(call)

    def amended(self, before, after):
        self.calls[self.calls.index(before)] = after

    def span(self, span):
        self.spans.append(span)

    def count(self, *told):
        self.counts.append(told)

    def look(self, open_calls):
        self.looks.append(open_calls)

    def follow(self, group, places):
        self.followed.append((group, places))

    def ask(self, timeout_s, *, is_last=False):
        self.asked()
        self.was_last = is_last
        ran, self.ran = self.ran, []
        return len(ran), ran


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 1e6)  # only when asked
    yield Told()
    assert observed.by is None


def test_nobody_is_told_before_somebody_listens_and_after(told):
    recorder = Recorder(told)
    assert observed.by is None
    recorder.listen(told)
    assert observed.by is recorder
    recorder.listen(other := Told())
    recorder.leave(told)
    assert observed.by is recorder
    assert not told.was_last
    recorder.spanned(span := Span("t", "r", "n", "k", 1.0, 2.0))
    recorder.leave(other)
    recorder.leave(other)
    assert (told.spans, other.spans) == ([], [span])
    assert told.was_last


def test_a_call_is_told_once_its_worker_has(told):
    recorder = Recorder(told)
    recorder.listen(told)
    places = {0: "here"}
    at = recorder.about_to_send("policy", places)
    recorder.about_to_send("policy", places)
    assert told.followed == [("policy", places)], "once"
    recorder.about_to_send("policy", dict(places))
    assert len(told.followed) == 2, "others, after a restart say"
    recorder.sent(at, "policy", "train", [0], [CALL])
    recorder.labelled(CALL, "balancer")
    recorder.counted("restarts", {"group": "policy"}, 2)
    recorder.look()
    assert (told.calls, told.counts) == ([], [("restarts", {"group": "policy"}, 2)])
    assert told.looks == [{"policy": 1}]
    recorder.taken(CALL, True)
    told.ran = [Ran(CALL, "policy", 0, "train", at + 1, at + 2)]
    recorder.look()
    (call,) = told.calls
    assert call == Call("policy", "train", at, (Part(0, at + 1, at + 2),), call.taken, True, "balancer")
    assert call.taken >= at
    recorder.leave(told)


def test_what_is_open_in_the_end_is_told_as_it_is(told):
    recorder = Recorder(told)
    recorder.listen(told)
    at = time.monotonic()
    recorder.sent(at, "policy", "train", [0], [CALL])
    recorder.ran(CALL, "policy", 0, "train", at + 1, at + 2, 0.0)
    recorder.listen(late := Told())
    recorder.leave(told, late)
    recorder.taken(CALL, True)
    assert told.calls == [Call("policy", "train", at, (Part(0, at + 1, at + 2),))], "as known then"
    assert late.calls == [], "it was sent before"


def test_whoever_begins_to_listen_is_told_of_no_call_that_was_sent_before(told):
    recorder = Recorder(told)
    recorder.listen(told)
    sent_and_done(recorder, told, "a")
    told.ran.append(Ran(b"elsewhere" + b"." * 15, "policy", 0, "elsewhere", *[time.monotonic()] * 2))
    recorder.listen(late := Told())
    recorder.look()  # only now workers tell of it
    sent_and_done(recorder, told, "b")
    recorder.leave(late)
    assert [call.method for call in late.calls] == ["b"]
    recorder.leave(told)
    assert sorted(call.method for call in told.calls) == ["a", "b", "elsewhere"]


def test_listeners_that_are_equal_are_told_once_until_the_last_of_them_leaves(told):
    class Counting(Told):
        """Counts for all of this process, as metrics do."""

        calls = looks = counts = spans = ()

        def __init__(self):
            self.ran, self.followed, self.asked = [], [], lambda: None

        def __eq__(self, other):
            return type(other) is Counting

        def __hash__(self):
            return 1

        def count(self, name, labels, value):
            Counting.counts = (*Counting.counts, name)

        def look(self, open_calls):
            Counting.looks = (*Counting.looks, open_calls)

        def call(self, call):
            Counting.calls = (*Counting.calls, call.method)

    recorder = Recorder(told)
    recorder.listen(first := Counting())
    recorder.listen(second := Counting())
    sent_and_done(recorder, told, "a")
    recorder.counted("restarts", {})
    recorder.leave(first)
    recorder.sent(time.monotonic(), "policy", "open", [0], [CALL])
    recorder.counted("stalls", {})
    recorder.leave(second)
    assert Counting.calls == ("a", "open")
    assert Counting.counts == ("restarts", "stalls")
    assert Counting.looks[-2:] == ({"policy": 1}, {}), "of nothing it is known any more that it is open"


def test_notes_above_the_most_are_counted(told):
    recorder = Recorder(told, most_notes=3)
    recorder.listen(told)
    for i in range(5):
        recorder.spanned(Span("t", "r", str(i), "k", 0.0, 1.0))
    assert recorder.dropped == 2
    recorder.look()
    recorder.spanned(Span("t", "r", "last", "k", 0.0, 1.0))
    recorder.leave(told)
    assert [span.name for span in told.spans] == ["0", "1", "2", "last"]


def test_a_call_of_many_ranks_counts_as_many_notes(told):
    recorder = Recorder(told, most_notes=3)
    recorder.listen(told)
    for name in (b"a", b"b"):
        recorder.sent(1.0, "policy", "train", [0, 1], [name * 24, name * 23 + b"1"])
    assert recorder.dropped == 1
    recorder.look()
    recorder.sent(2.0, "policy", "train", [0, 1], [b"c" * 24, b"d" * 24])
    assert recorder.dropped == 1, "there is room again"
    recorder.leave(told)


def test_there_is_room_again_while_many_notes_are_taken_in(told, monkeypatch):
    monkeypatch.setattr(module, "_AT_A_TIME", 2)
    recorder = Recorder(told, most_notes=5)  # of which a look makes one
    recorder.listen(told)
    monkeypatch.setattr(told, "span", lambda span: recorder.counted(span.name, {}))
    for i in range(4):
        recorder.spanned(Span("t", "r", str(i), "k", 0.0, 1.0))
    recorder.look()
    assert [name for name, *_ in told.counts] == ["2", "3"]
    assert recorder.dropped == 2, "of what came while the first two were taken in"
    recorder.leave(told)


def sent_and_done(recorder, told, name):
    """A call from its start to its end, which a worker tells when it is asked."""
    at = recorder.about_to_send("policy", {0: "here"})
    recorder.sent(at, "policy", name, [0], [name.encode() * 24])
    recorder.taken(name.encode() * 24, True)
    told.ran.append(Ran(name.encode() * 24, "policy", 0, name, at, at + 1.0))


def looking(monkeypatch, recorder, listener):
    """The recorder's own looks, one by one."""
    looks = iter([False, True])
    monkeypatch.setattr(recorder, "_ending", SimpleNamespace(wait=lambda _: next(looks), set=lambda: None))
    recorder._keep_looking()
    return [call.method for call in listener.calls]


def test_who_wants_to_be_told_later_is_when_somebody_looks_or_too_much_waits(told, monkeypatch):
    monkeypatch.setattr(module, "MOST_PATIENT", 3)
    monkeypatch.setattr(module, "_AT_A_TIME", 1)
    recorder = Recorder(told)
    told.wants = "later"
    recorder.listen(told)
    sent_and_done(recorder, told, "a")
    assert looking(monkeypatch, recorder, told) == []
    sent_and_done(recorder, told, "b")
    assert looking(monkeypatch, recorder, told) == ["a"], "6 notes waited"
    recorder.look()
    assert [call.method for call in told.calls] == ["a", "b"]
    sent_and_done(recorder, told, "c")
    assert looking(monkeypatch, recorder, told) == ["a", "b"]
    recorder.listen(other := Told())
    assert [call.method for call in told.calls] == ["a", "b", "c"]
    sent_and_done(recorder, told, "d")
    assert looking(monkeypatch, recorder, other) == ["d"], "now, and nothing of what was before"
    recorder.leave(other)
    sent_and_done(recorder, told, "e")
    recorder.leave(told)
    assert [call.method for call in told.calls] == ["a", "b", "c", "d", "e"]
    assert all(call.parts[0].began == call.sent for call in told.calls)


def test_what_workers_tell_of_calls_of_others_waits_in_no_more_memory_than_notes_do(told, monkeypatch):
    monkeypatch.setattr(module, "MOST_PATIENT", 9)
    recorder = Recorder(told)
    told.wants = "later"
    recorder.listen(told)
    at = time.monotonic()
    told.ran = [Ran(bytes([i]) * 24, "policy", 0, "theirs", at, at) for i in range(40)]
    looking(monkeypatch, recorder, told)
    assert not recorder._notes, "one look had them all"
    recorder.leave(told)
    assert len(told.calls) == 40


def test_while_nobody_wants_calls_they_are_only_counted(told, monkeypatch):
    recorder = Recorder(told)
    recorder.listen(told)
    told.wants = "nothing"
    looking(monkeypatch, recorder, told)
    told.asked = lambda: pytest.fail("nobody wants to know")
    sent_and_done(recorder, told, "a")
    recorder.spanned(Span("t", "r", "n", "k", 0.0, 1.0))
    recorder.counted("restarts", {})
    assert looking(monkeypatch, recorder, told) == []
    assert (told.n_left_out, told.spans, told.counts) == (2, [], [])
    told.asked, told.wants = (lambda: None), "now"
    looking(monkeypatch, recorder, told)
    sent_and_done(recorder, told, "b")
    recorder.look()
    assert [call.method for call in told.calls] == ["b"], "workers noted the first one, too"
    told.wants = "nothing"
    looking(monkeypatch, recorder, told)
    sent_and_done(recorder, told, "not wanted")
    recorder.look()  # before workers end, say
    recorder.listen(other := Told())
    sent_and_done(recorder, told, "c")
    recorder.leave(other)
    assert [call.method for call in other.calls] == ["c"], "whoever comes wants to be told at once"
    recorder.leave(told)


@pytest.mark.hostile
def test_what_waits_is_nothing_that_the_garbage_collector_looks_at_again(told):
    recorder = Recorder(told)
    recorder.listen(told)
    for i in range(3):
        sent_and_done(recorder, told, str(i))
    for _ in range(3):  # each tells of tuples in tuples one deep
        gc.collect()
    assert len(recorder._notes) == 6
    assert not any(map(gc.is_tracked, recorder._notes))
    recorder.leave(told)


@pytest.mark.hostile
def test_handles_that_come_and_go_are_not_kept(told):
    class Places(dict):
        """What can be seen to be let go of."""

    recorder = Recorder(told)
    recorder.listen(told)
    first = Places({0: "here"})
    gone = weakref.ref(first)
    recorder.about_to_send("policy", first)
    del first
    for _ in range(module.MOST_KNOWN):
        recorder.about_to_send("policy", {0: "here"})
    told.followed.clear()
    assert gone() is None
    recorder.leave(told)


@pytest.mark.hostile
def test_a_note_above_the_most_waits_for_no_look_at_nodes(told):
    recorder = Recorder(told, most_notes=0)
    recorder.listen(told)

    def note_elsewhere():
        noting = threading.Thread(target=recorder.counted, args=("n", {}), daemon=True)
        noting.start()
        noting.join(PATIENCE_S)
        assert not noting.is_alive()

    told.asked = note_elsewhere
    recorder.look()
    assert recorder.dropped == 1
    told.asked = lambda: None
    recorder.leave(told)


@pytest.mark.hostile
def test_a_handler_of_a_signal_may_look_while_its_thread_does_and_waits_for_no_other(told):
    recorder = Recorder(told)
    recorder.listen(told)
    looks = []

    def handle():
        told.asked = lambda: looks.append("again")
        recorder.look()
        other = threading.Thread(target=recorder.look, args=(0.01,), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive()

    told.asked = handle
    recorder.look()
    assert looks == []
    recorder.leave(told)
    assert looks == ["again"]


def test_a_listener_that_fails_leaves_others_alone(told, caplog):
    class Failing(Told):
        def span(self, span):
            raise ValueError(span.name)

    recorder = Recorder(told)
    recorder.listen(failing := Failing())
    recorder.listen(told)
    recorder.spanned(Span("t", "r", "n", "k", 0.0, 1.0))
    recorder.leave(failing)
    recorder.leave(told)
    assert len(told.spans) == 1
    assert "can't take in what it was told" in caplog.text


@pytest.mark.parametrize(("parts", "spans"), [(0, 1), (1, 4), (2, 7), (3, 10)])
def test_a_call_counts_as_many_spans_as_it_may_make(parts, spans):
    call = Call("policy", "train", 0.0, tuple(Part(rank, 1.0, 2.0 + rank) for rank in range(parts)), 9.0)
    for most, kept_calls in ((spans, [call]), (spans - 1, [])):
        kept = Kept(most)
        kept.call(call)
        kept.span(Span("t", "r", "n", "k", 0.0, 1.0))
        assert kept.calls() == kept_calls
        assert len(kept.spans()) <= most


def test_what_is_kept_is_bounded():
    kept = Kept(9)
    call = Call("policy", "train", 0.0, (Part(0, 1.0, 2.0), Part(1, 1.0, 3.0)), 3.0)
    assert kept.wants == "later"
    kept.call(call)
    assert kept.wants == "later"
    kept.call(Call("policy", "train", 5.0, call.parts, 8.0))
    assert kept.wants == "nothing"
    kept.call(Call("policy", "train", 9.0, (), 9.0))  # a smaller one, without those that were before it
    assert (len(kept), kept.dropped) == (1, 2)
    kept.span(Span("t", "r", "n", "k", 0.0, 1.0))
    kept.span(Span("t", "r", "n", "k", 0.0, 1.0))
    kept.span(Span("t", "r", "n", "k", 0.0, 1.0))
    assert (kept.calls(), kept.dropped) == ([call], 3)
    kept.left_out()
    assert kept.dropped == 4
    kept.amended(Call("policy", "train", 0.0, ()), call)
    assert kept.calls() == [call], "of one that did not fit"
    kept.amended(call, later := Call("policy", "train", 0.0, (Part(0, 1.0, 4.0), Part(1, 1.0, 3.0)), 3.0))
    assert kept.calls() == [later]
    assert len(kept.spans()) == 2 + 5 + 1


@given(st.lists(any_calls(), max_size=6), st.data())
def test_what_is_kept_comes_back_as_it_was(calls, data):
    kept = Kept(1_000)
    for call in calls:
        kept.call(call._replace(context=object()))
    assert (kept.calls(), len(kept)) == (calls, len(calls))
    for before in calls:
        kept.amended(before, data.draw(any_calls()))
        kept.amended(before._replace(method="never called"), before)
    assert len(kept) == len(calls)


def test_what_is_kept_is_nothing_that_the_garbage_collector_looks_at():
    class Method(enum.StrEnum):
        TRAIN = "train"

    class Rank(enum.IntEnum):
        FIRST = 0

    kept = Kept(100)
    kept.call(Call(Method.TRAIN, Method.TRAIN, 0.0, (Part(Rank.FIRST, 1.0, 2.0),), 3.0, True))
    assert kept.calls() == [Call("train", "train", 0.0, (Part(0, 1.0, 2.0),), 3.0, True)]
    assert not any(map(gc.is_tracked, kept._calls))
