"""The thread that owns an engine: between two steps it takes requests, pauses, and loads weights.

Each token belongs to the version whose weights chose it, because nothing else is done during a step. Whoever
calls gets a future, and never touches the engine or the requests itself.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from generation.engine import Engine, EngineLoad, Request
from generation.errors import AsleepError, EngineFailedError, GenerationError, SamplingError
from generation.modes import PauseMode
from generation.tracks import Counts, Listener, Sink, Track
from raycrew.tensor_transport import StaleWeightsError

T = TypeVar("T")
PAUSE_S = 0.005


class EngineLoop:
    """Steps an engine while there are requests and nobody holds it.

    Args:
        make: Makes the engine, in the thread.
        version: Asked before each step: of the weights that the engine has.

    Raises:
        Exception: What `make` raises.
    """

    def __init__(self, make: Callable[[], Engine], version: Callable[[], int]) -> None:
        self.counts = Counts()
        self._version = version
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._gate, self._is_closed = threading.Lock(), False
        self._running: dict[str, Track] = {}
        self._waiting: dict[str, Track] = {}
        self._holds: set[str] = set()
        self._finishing: dict[str, Future[None]] = {}
        self._failure: BaseException | None = None
        self._is_doubtful = self._dozes = False
        self._unended: BaseException | None = None
        made: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="engine", daemon=True)
        self._thread.start()
        self.engine = made.result()

    # From any thread

    def call(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in the engine's thread, between two steps.

        Raises:
            AsleepError: The loop is closed.
        """
        future: Future[T] = Future()
        with self._gate:
            if self._is_closed:
                raise _asleep()
            self._commands.put((future, lambda: function(*args)))
        return future

    def within(self, function: Callable[..., T], *args: Any) -> T:
        """`call`, and its result; in the engine's thread itself, just the function."""
        if threading.current_thread() is self._thread:
            return function(*args)
        return self.call(function, *args).result()

    def submit(
        self, requests: Sequence[Request], sink: Sink, listener: Listener | None = None
    ) -> Future[None]:
        """Have samples made; in a pause they wait for its end."""
        return self.call(self._submit, [Track(request, sink, listener) for request in requests])

    def abort(self, call: str | None) -> Future[int]:
        """End the requests of a call, or all; they are given on as far as they have come. Tells how many."""
        return self.call(self._abort, lambda track: call in (None, track.request.call))

    def fail(self, error: BaseException) -> Future[None]:
        """End all requests with an error, in place of a sample, and take none until there are weights."""
        return self.call(self._end_all, error)

    def trust(self) -> Future[None]:
        """Take requests again, as weights are about to come; or else `fail` is called."""
        return self.call(self._trust)

    def discard(self, requests: Sequence[Request]) -> None:
        """End requests whose samples nobody waits for any more."""
        ids = {request.id for request in requests}
        self.call(self._abort, lambda track: track.request.id in ids)

    def change_adapter(self, name: str, change: Callable[[], None]) -> Future[None]:
        """Have the engine load another adapter of a name, or none; what is under way with it is aborted.

        That could not go on: engines read a folder anew, where another adapter may lie by now.
        """
        return self.call(self._change_adapter, name, change)

    def pause(self, mode: PauseMode, reason: str) -> Future[None]:
        """Step no further until `resume` with the same reason; the future ends when that is so.

        That comes also where nobody waits for it any more: the future can't be cancelled.
        """
        paused: Future[None] = Future()
        paused.set_running_or_notify_cancel()
        self.call(self._pause, mode, reason, paused)
        return paused

    def resume(self, reason: str) -> Future[None]:
        """Go on, unless there is another reason not to."""
        return self.call(self._resume, reason)

    def load(self) -> Future[EngineLoad]:
        """What the engine is at, with what waits for the end of a pause."""
        return self.call(self._load)

    def doze(self) -> Future[None]:
        """End what is on its way as aborted, have the engine doze, and take nothing until `rouse`."""
        return self.call(self._doze)

    def rouse(self) -> Future[None]:
        """Have the engine take its memory again."""
        return self.call(self._rouse)

    def is_paused(self, reason: str) -> bool:
        """Whether there is a pause for this reason."""
        return reason in self._holds

    def is_held(self, reason: str) -> bool:
        """Whether there is a pause for this reason, or one about to be."""
        return reason in self._holds or reason in self._finishing

    @property
    def condition(self) -> str:
        """What it is at: "awake", "paused" or "failed"."""
        if self.has_failed:
            return "failed"
        return "paused" if self.is_held("caller") else "awake"

    @property
    def has_failed(self) -> bool:
        """Whether the engine raised while it generated, so that it can't go on."""
        return self._failure is not None

    def check_failed(self) -> None:
        """Whether it can go on.

        Raises:
            EngineFailedError: The engine raised while it generated.
        """
        if self.has_failed:
            raise self._as_failed() from self._failure

    def is_stuck(self) -> bool:
        """Whether requests wait in a pause that nothing will end by itself."""
        return bool(self._running and self._holds)

    def close(self) -> None:
        """End what is on its way as aborted, close the engine, and end the thread; idempotent.

        Raises:
            GenerationError: The engine did not end: what it has of memory and processes may still be there.
        """
        with self._gate:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)
        self._thread.join()
        if (error := self._unended) is not None:
            raise GenerationError(f"the engine did not end ({error!r}): end its worker") from error

    # In the engine's thread

    def _run(self, make: Callable[[], Engine], made: "Future[Engine]") -> None:
        try:
            engine = make()
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            made.set_exception(error)
            return
        made.set_result(engine)
        while self._turn():
            if self._may_step():
                self._step(engine)
        self._abort(lambda _: True)
        self._end_finishing(AsleepError("the generator was sent to sleep before its requests had ended"))
        try:
            engine.close()
        except BaseException as error:  # noqa: BLE001 - who has it closed is told
            self._unended = error

    def _turn(self) -> bool:
        """Do what was asked for, waiting for it if there is nothing to step; False once that was to end."""
        while not self._may_step() or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            future, run = command
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(run())
                except BaseException as error:  # noqa: BLE001 - whoever asked is told
                    future.set_exception(error)
        return True

    def _may_step(self) -> bool:
        return bool(self._running) and not self._holds

    def _step(self, engine: Engine) -> None:
        began = time.perf_counter()
        try:
            version = self._version()
            pieces = engine.step()
        except StaleWeightsError:  # an update that was not announced by a pause: it is over in a moment
            time.sleep(PAUSE_S)
            return
        except BaseException as error:  # noqa: BLE001 - those whose requests they were are told
            self._fail(error)
            return
        for piece in pieces:
            track = self._running.get(piece.request_id)
            if track is None:
                continue
            track.take(piece, version)
            self.counts.tokens += len(piece.tokens)
            if piece.finish_reason is not None:
                del self._running[piece.request_id]
                self.counts.finished += 1
                track.sink(track.request, track.ended(piece.finish_reason))
        self.counts.seconds += time.perf_counter() - began
        self._settle()

    def _submit(self, tracks: Sequence[Track]) -> None:
        if self._dozes:
            raise _asleep()
        self.check_failed()
        if self._is_doubtful:
            self._version()
        if self._holds or self._finishing:
            self._waiting |= {track.request.id: track for track in tracks}
        else:
            self._admit(tracks)

    def _admit(self, tracks: Sequence[Track]) -> None:
        for track in tracks:
            try:
                self.engine.add(track.request)
            except BaseException as error:  # noqa: BLE001 - whose request it is, is told
                track.sink(track.request, _not_taken(error))
            else:
                self._running[track.request.id] = track

    def _change_adapter(self, name: str, change: Callable[[], None]) -> None:
        change()
        self._abort(lambda track: track.request.id in self._running and track.request.adapter == name)

    def _abort(self, which: Callable[[Track], bool]) -> int:
        running = [track for track in self._running.values() if which(track)]
        waiting = [track for track in self._waiting.values() if which(track)]
        if running and not self._forget(running):
            return 0
        for track in (*running, *waiting):
            self._running.pop(track.request.id, None)
            self._waiting.pop(track.request.id, None)
            track.sink(track.request, track.ended("abort"))
        self.counts.aborted += len(running) + len(waiting)
        self._settle()
        return len(running) + len(waiting)

    def _forget(self, tracks: Iterable[Track]) -> bool:
        """Have the engine forget requests; whether it did. One that can't has failed."""
        try:
            self.engine.abort([track.request.id for track in tracks])
        except BaseException as error:  # noqa: BLE001 - those whose requests they are are told
            self._fail(error)
            return False
        return True

    def _pause(self, mode: PauseMode, reason: str, paused: "Future[None]") -> None:
        if mode == "abort":
            self._abort(lambda _: True)
        if mode != "finish" or not self._running:
            self._holds.add(reason)
            if self._running and reason == "caller":  # an update's pause ends by itself
                self._end_finishing(
                    GenerationError("another pause came before the requests of this had ended")
                )
            paused.set_result(None)
            return
        if "caller" in self._holds and reason != "caller":  # nothing else ends that
            paused.set_exception(GenerationError("samples on their way wait in a pause, and can't end"))
            return
        self._holds.discard(reason)
        if (before := self._finishing.get(reason)) is not None:
            before.add_done_callback(lambda ended: _follow(ended, paused))
        else:
            self._finishing[reason] = paused

    def _resume(self, reason: str) -> None:
        self._holds.discard(reason)
        if (paused := self._finishing.pop(reason, None)) is not None:
            paused.set_exception(GenerationError("resumed before the requests of this pause had ended"))
        if not self._holds and not self._finishing:
            waiting, self._waiting = list(self._waiting.values()), {}
            self._admit(waiting)

    def _end_finishing(self, error: GenerationError) -> None:
        finishing, self._finishing = self._finishing, {}
        for paused in finishing.values():
            paused.set_exception(error)

    def _settle(self) -> None:
        """Once nothing runs, pauses that waited for that begin."""
        if self._running:
            return
        for reason, paused in self._finishing.items():
            self._holds.add(reason)
            paused.set_result(None)
        self._finishing.clear()

    def _doze(self) -> None:
        self._dozes = True
        self._abort(lambda _: True)
        self.engine.doze()

    def _rouse(self) -> None:
        self.engine.rouse()
        self._dozes = False

    def _load(self) -> EngineLoad:
        load = self.engine.load()
        return EngineLoad(load.running, load.waiting + len(self._waiting), load.kv_cache_use)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        failed = self._as_failed()
        failed.__cause__ = error
        self._drop_all(failed)

    def _end_all(self, error: BaseException) -> None:
        self._is_doubtful = True
        if self._forget(self._running.values()):
            self._drop_all(error)

    def _trust(self) -> None:
        self._is_doubtful = False

    def _drop_all(self, error: BaseException) -> None:
        tracks = [*self._running.values(), *self._waiting.values()]
        self._running, self._waiting = {}, {}
        for track in tracks:
            track.sink(track.request, error)
        self._settle()

    def _as_failed(self) -> EngineFailedError:
        error = self._failure
        return EngineFailedError(
            f"the engine failed ({type(error).__name__}: {error}): wake() makes a new one"
        )


def _asleep() -> AsleepError:
    return AsleepError("this generator sleeps, and has no engine: wake() it first")


def _not_taken(error: BaseException) -> BaseException:
    """What is told of a request that an engine has not taken; a ValueError says what is wrong with it."""
    if not isinstance(error, ValueError):
        return error
    told = SamplingError(f"the engine does not take this: {error}")
    told.__cause__ = error
    return told


def _follow(ended: "Future[None]", other: "Future[None]") -> None:
    error = ended.exception()
    if error is None:
        other.set_result(None)
    else:
        other.set_exception(error)
