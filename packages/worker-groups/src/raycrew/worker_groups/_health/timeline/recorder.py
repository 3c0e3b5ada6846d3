"""What is told of calls while somebody wants to know: noted in a moment, put together when somebody looks."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from raycrew.worker_groups._health.observers import LOOK_WITHIN_S, Observer, Span, observed
from raycrew.worker_groups._health.timeline.ledger import Gone, Ledger, Ran
from raycrew.worker_groups._health.timeline.records import LATER, NOTHING, NOW, Call, Wants

logger = logging.getLogger(__name__)

LOOK_S = 1.0
#: How many notes may wait to be put together, one of a call for each rank; those above are counted, and
#: forgotten.
MOST_NOTES = 200_000
#: How many wait for somebody to look, while nobody wants to be told now.
MOST_PATIENT = 100_000
_AT_A_TIME = 1_000  # notes, until there is room for as many others
_TOLD_IN_A_NOTE = 4  # calls that workers tell of take as much memory as one note
#: Of how many groups and handles it is known that their workers are followed; of others that is asked again.
MOST_KNOWN = 1_000

#: What it is of, what it says, and how many it counts as. Of tuples of numbers, bytes and text the garbage
#: collector looks at none twice; at anything else that waits, it would again and again.
_Note = tuple[str, tuple[Any, ...], int]


class Listener(Protocol):
    """Who is told of what is over; called from one thread at a time.

    Of those that are equal, one is told.
    """

    @property
    def wants(self) -> Wants:
        """Whether it wants to be told now, later when somebody looks, or of no more calls."""
        ...

    def left_out(self) -> None:
        """A call was sent, or something else was over, while nobody wanted any."""
        ...

    def call(self, call: Call) -> None:
        """A call."""
        ...

    def amended(self, before: Call, after: Call) -> None:
        """A call that was told of, when another of its ranks has told when it ran."""
        ...

    def span(self, span: Span) -> None:
        """Something else that took its time."""
        ...

    def count(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Something that happened."""
        ...

    def look(self, open_calls: Mapping[str, int]) -> None:
        """It is time to look: by group, how many calls are open."""
        ...


class Workers(Protocol):
    """Those that know when calls ran."""

    def follow(self, group: str, places: Mapping[int, Any]) -> None:
        """Have some more of them note their calls from now on."""
        ...

    def ask(
        self, timeout_s: float = LOOK_WITHIN_S, *, is_last: bool = False
    ) -> tuple[int, Iterable[Ran | Gone]]:
        """How many calls they have noted at most since they were asked last, those, and who has ended.

        They note more unless this is the last time.
        """
        ...


class Recorder(Observer):
    """Tells listeners of calls and other things.

    Args:
        workers: Those that know when calls ran.
        most_notes: How many notes may wait; one of a call counts as one of each rank.

    Attributes:
        dropped: How many notes were forgotten, because too many waited.
    """

    def __init__(self, workers: Workers, most_notes: int = MOST_NOTES) -> None:
        self.dropped = 0
        self._workers, self._most_notes, self._n_waiting = workers, most_notes, 0
        self._listeners: tuple[Listener, ...] = ()
        self._since: dict[Listener, float] = {}  # each is told of calls from then on
        self._notes: deque[_Note] = deque()
        self._wants: Wants = NOW
        self._resumed = 0.0  # workers may note calls before that which are not noted here
        self._capture: Callable[[], Any] | None = None
        self._known: dict[int, Mapping[int, Any]] = {}
        self._ledger = Ledger(self._closed, self._amended)
        self._lock, self._counting = threading.RLock(), threading.RLock()  # a signal's handler may come back
        self._is_looking = False
        self._ending = threading.Event()
        self._takes: dict[str, Callable[..., None]] = {
            "sent": self._ledger.sent,
            "taken": self._ledger.taken,
            "labelled": self._ledger.labelled,
            "ran": self._take_ran,
            "looked": self._take_looked,
            "spanned": self._take_spanned,
            "counted": self._take_counted,
        }

    # Whoever has something to tell: these cost about a microsecond.

    def about_to_send(self, group: str, places: Mapping[int, Any]) -> float:
        """See `Observer`."""
        if id(places) not in self._known:
            self._workers.follow(group, places)
            with self._counting:
                self._known[id(places)] = places  # as long as it is kept, no other has its id
                while len(self._known) > MOST_KNOWN:
                    del self._known[next(iter(self._known))]
        return time.monotonic()

    def sent(self, at: float, group: str, method: str, ranks: Sequence[int], calls: Sequence[bytes]) -> None:
        """See `Observer`."""
        capture = self._capture
        context = None if capture is None else capture()
        self._note("sent", (at, group, method, tuple(ranks), tuple(calls), context), len(calls))

    def ran(
        self, call: bytes, group: str, rank: int, method: str, began: float, ended: float, paused_s: float
    ) -> None:
        """See `Observer`."""
        self._note("ran", (Ran(call, group, rank, method, began, ended, paused_s),))

    def labelled(self, call: bytes, label: str) -> None:
        """See `Observer`."""
        self._note("labelled", (call, label))

    def taken(self, call: bytes, ok: bool) -> None:
        """See `Observer`."""
        self._note("taken", (time.monotonic(), call, ok))

    def spanned(self, span: Span) -> None:
        """See `Observer`."""
        self._note("spanned", (span,))

    def counted(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        """See `Observer`."""
        self._note("counted", (name, labels, value))

    def _note(self, kind: str, told: tuple[Any, ...], counts: int = 1) -> None:
        with self._counting:  # not the other: whoever looks has it, and waits for nodes
            if self._wants == NOTHING:
                self._leave_out(kind)
            elif self._n_waiting + counts > self._most_notes:
                self.dropped += 1
            else:
                self._n_waiting += counts
                self._notes.append((kind, told, counts))

    def _leave_out(self, kind: str) -> None:
        if kind in ("sent", "spanned"):
            for listener in self._since:
                listener.left_out()

    # Putting together.

    def listen(self, listener: Listener) -> None:
        """Tell a listener from now on, and begin with the first one."""
        with self._lock:
            self._drain()  # of what was before, others are told
            self._listeners = (*self._listeners, listener)
            self._since = {listener: time.monotonic(), **self._since}
            self._capture = self._capture or getattr(listener, "capture", None)
            self._want(NOW)  # from the first look on, what they do
            if observed.by is None:
                observed.by = self
                threading.Thread(target=self._keep_looking, name="raycrew-timeline", daemon=True).start()

    def leave(self, *listeners: Listener) -> None:
        """Tell listeners what is known by now, and nothing more; end with the last ones."""
        with self._lock:
            leaving = set(map(id, listeners))
            staying = tuple(listener for listener in self._listeners if id(listener) not in leaving)
            if len(staying) == len(self._listeners):
                return
            if not staying and observed.by is self:
                observed.by = None
            try:
                self._look(LOOK_WITHIN_S, is_last=not staying)
            finally:  # nodes are waited for: a Ctrl-C comes there
                self._let_go(staying)

    def _let_go(self, staying: tuple[Listener, ...]) -> None:
        if not staying:
            self._ending.set()
        self._drain()
        leaving = {listener: since for listener, since in self._since.items() if listener not in staying}
        self._listeners = staying
        self._since = {listener: self._since[listener] for listener in staying}
        for call in self._ledger.unfinished():
            for listener in _concerned(leaving, call):
                _told(listener.call, call)
        for listener in leaving:  # it is no longer known what is open
            _told(listener.look, {})

    def look(self, timeout_s: float = LOOK_WITHIN_S) -> None:
        """See `Observer`; while another thread looks that long, this does not."""
        self._look_alone(timeout_s, leave=0)

    def _look_alone(self, timeout_s: float, leave: int) -> None:
        due = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            self._look(due - time.monotonic(), leave=leave)
        finally:
            self._lock.release()

    def _look(self, timeout_s: float, *, is_last: bool = False, leave: int = 0) -> None:
        """Ask workers, and put together what waits but for so many notes."""
        if self._is_looking:  # in a signal's handler, after which the look that it has interrupted goes on
            return
        self._is_looking = True
        try:
            n, ran = self._workers.ask(timeout_s, is_last=is_last)
            with self._counting:  # after workers were asked: what has run was sent before
                counts = 1 + n // _TOLD_IN_A_NOTE
                self._n_waiting += counts
                self._notes.append(("looked", (time.monotonic(), ran), counts))
            self._drain(leave)
        finally:
            self._is_looking = False

    def _keep_looking(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self._listen_on()
            except Exception:
                logger.exception("calls were not put together; they are, with the next ones")

    def _listen_on(self) -> None:
        """Look as listeners want it."""
        wants = {listener.wants for listener in self._since}
        self._want(NOW if NOW in wants else LATER if LATER in wants else NOTHING)
        if self._wants != NOTHING:
            self._look_alone(LOOK_WITHIN_S, 0 if self._wants == NOW else MOST_PATIENT)

    def _want(self, wants: Wants) -> None:
        if wants == NOTHING:
            self._resumed = math.inf
        elif self._wants == NOTHING:
            self._resumed = time.monotonic()
        self._wants = wants

    def _drain(self, leave: int = 0) -> None:
        while self._notes and self._n_waiting > leave:
            self._take_some()

    def _take_some(self) -> None:
        """Some notes at a time: room for others is there while many are taken in."""
        taken = 0
        try:
            for kind, told, counts in islice(iter(self._next_note, None), _AT_A_TIME):
                taken += counts
                self._takes[kind](*told)
        finally:
            with self._counting:
                self._n_waiting -= taken

    def _next_note(self) -> _Note | None:
        try:
            return self._notes.popleft()
        except IndexError:  # or a signal's handler has taken the last one
            return None

    def _take_looked(self, at: float, told: Iterable[Ran | Gone]) -> None:
        for one in told:
            if isinstance(one, Gone):
                self._ledger.gone(at, one)
            elif one.began >= self._resumed:
                self._ledger.ran(at, one)
        self._ledger.settle(at)
        open_calls = dict(self._ledger.open_calls())
        for listener in self._since:
            _told(listener.look, open_calls)

    def _take_ran(self, ran: Ran) -> None:
        self._ledger.ran(ran.ended, ran)

    def _take_spanned(self, span: Span) -> None:
        for listener in self._since:
            _told(listener.span, span)

    def _take_counted(self, *told: Any) -> None:
        for listener in self._since:
            _told(listener.count, *told)

    def _closed(self, call: Call) -> None:
        for listener in _concerned(self._since, call):
            _told(listener.call, call)

    def _amended(self, before: Call, after: Call) -> None:
        for listener in _concerned(self._since, before):
            _told(listener.amended, before, after)


def _concerned(since: Mapping[Listener, float], call: Call) -> list[Listener]:
    """Those that have listened when a call was sent."""
    start = call.start if call.sent is None else call.sent
    return [listener for listener, began in since.items() if start is None or start >= began]


def _told(tell: Callable[..., object], *what: Any) -> None:
    """One listener that fails leaves the others alone."""
    try:
        tell(*what)
    except Exception:
        logger.exception("%r can't take in what it was told", tell)
