"""An engine with what receives its weights: made together, given up together, changed by one at a time."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from generation.engine import Engine, Receiver, WeightSource
from generation.errors import AsleepError, GenerationError
from generation.freeing import give_back
from generation.loop import EngineLoop
from generation.modes import PauseMode
from generation.prompts import Limits
from raycrew.tensor_transport import RouteStore, StaleWeightsError, WeightReceipt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Awake:
    """What a worker has while it does not sleep."""

    loop: EngineLoop
    receiver: Receiver | None
    source: WeightSource | None

    def version(self) -> int:
        """Of the weights; 0 for those that the engine was made with, where nobody updates them.

        Raises:
            StaleWeightsError: They are of no version, or a mixture.
        """
        return 0 if self.receiver is None else self.receiver.require()

    def known_version(self) -> int | None:
        """The same; None in place of the error."""
        try:
            return self.version()
        except StaleWeightsError:
            return None

    def leave(self) -> None:
        """Leave the directory and the route, and hold nothing of what was published."""
        if self.receiver is not None:
            self.receiver.close()
        if self.source is not None:
            self.source.close()

    def close(self) -> None:
        """Leave the directory, and give up the engine."""
        self.leave()
        self.loop.close()


class EngineLife:
    """An engine that is made at once or later, and may sleep and be updated.

    Args:
        make: Makes an engine, in the thread that will own it.
        open_source: Says of each engine where its weights come from; None to keep those it is made with.
        asleep: Whether the first one is made by `wake`.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        open_source: Callable[[], WeightSource] | None,
        asleep: bool = False,
    ) -> None:
        self._make, self._open_source = make, open_source
        self._changes = threading.Lock()
        self._limits: Limits | None = None
        self._held: Awake | None = None
        self._dozing: EngineLoop | None = None
        self._ending: Awake | EngineLoop | None = None
        self.state: Awake | None = None if asleep else self._begin()

    @property
    def awake(self) -> Awake:
        """The engine.

        Raises:
            AsleepError: There is none now.
        """
        if (state := self.state) is None:
            raise AsleepError("this generator sleeps, and has no engine: wake() it first")
        return state

    def check_weights(self) -> None:
        """Whether there are weights to generate with now, or, where an update is under way, after it.

        Raises:
            AsleepError: There is no engine now.
            StaleWeightsError: They are of no version, or a mixture.
        """
        if self.awake.known_version() is None and not self._changes.locked():
            self.awake.version()  # an update may have ended between the two

    @property
    def asleep(self) -> str:
        """What its sleep is, and its wake, in words."""
        if self._dozing is None:
            return "there is no engine; wake() makes one"
        return "the engine has given up its memory; wake() has it take that again"

    @property
    def limits(self) -> Limits:
        """What its model can take.

        Raises:
            AsleepError: There was no engine yet.
        """
        return self.awake.loop.engine.limits if self._limits is None else self._limits

    @property
    def receiver(self) -> Receiver:
        """What receives its weights.

        Raises:
            AsleepError: There is no engine now.
            GenerationError: Its weights are never updated.
        """
        if (receiver := self.awake.receiver) is None:
            raise GenerationError("this generator was made without a directory: its weights stay as they are")
        return receiver

    def join_route(self, told: Any) -> Any:
        """See `GenerationWorker.join_route`; it may end what an update waits for, and waits for none."""
        source = self.awake.source
        if source is None or not isinstance(source.store, RouteStore):
            raise GenerationError(
                "this generator has no store for routes: make it with a directory, and with store=RouteStore "
                "(the class itself)"
            )
        return source.store.join(told)

    def update(self, how: Callable[[Receiver], T], mode: PauseMode) -> T:
        """Have the receiver change the weights while nothing is generated; without any nothing goes on."""
        with self._changes:
            state, receiver = self.awake, self.receiver
            state.loop.trust().result()
            if state.known_version() is None:
                mode = "continue"  # What has come has not begun, and waits as what comes later.
            _pause_for_update(state.loop, mode)
            why: BaseException | None = None
            try:
                return how(receiver)
            except BaseException as error:
                why = error
                raise
            finally:
                _go_on(state, why)

    def catch_up(self, mode: PauseMode) -> None:
        """Take the latest version where none is held and there is one."""
        state = self.state
        if state is not None and state.receiver is not None and state.receiver.version is None:
            self.update(_pull, mode)

    def sleep(self, mode: PauseMode) -> None:
        """See `GenerationWorker.sleep`."""
        with self._changes:
            self._check_ended()
            if (state := self.state) is None:
                return
            if state.known_version() is None:
                mode = "abort"  # What has come can't begin.
            if mode == "finish" and state.loop.is_stuck():
                raise GenerationError(
                    "samples on their way wait in a pause, and can't end: resume(), or sleep('abort')"
                )
            state.loop.pause(mode, "sleep").result()
            self.state = self._held = None
            if state.loop.engine.dozes and not state.loop.has_failed:
                self._doze(state)
            else:
                self._end(state)
            del state
            give_back()

    def wake(self) -> None:
        """See `GenerationWorker.wake`."""
        with self._changes:
            self._check_ended()
            if (failed := self.state) is not None:
                if not failed.loop.has_failed:
                    _go_on(failed, None)  # what came meanwhile took this for an update
                    return
                self.state = None
                self._end(failed)
                del failed
                give_back()
            state = self._begin()
            try:
                if state.receiver is not None:
                    _pull(state.receiver)
                for reason in ("caller", "update", "sleep"):  # as one that was made anew
                    state.loop.resume(reason).result()
            except BaseException:
                self._end(state)
                raise
            self.state = state

    def _end(self, what: Awake | EngineLoop) -> None:
        """Give the engine up; what did not end is known from then on."""
        self._ending, self._held = what, None
        what.close()
        self._ending = None

    def _check_ended(self) -> None:
        """Refuse what another engine beside one that did not end would be, or a sleep that gives nothing up.

        Raises:
            GenerationError: There is one.
        """
        if self._ending is not None:
            self._ending.close()

    def _doze(self, state: Awake) -> None:
        """Keep the engine, without its memory; one that can't is given up."""
        try:
            state.leave()
            state.loop.doze().result()
        except BaseException:
            self._end(state.loop)
            raise
        self._dozing = state.loop

    def _begin(self) -> Awake:
        """An engine, and what receives its weights: another one each time, as a doze may forget them."""
        dozing, self._dozing = self._dozing, None
        loop = dozing or EngineLoop(self._make, self._version)
        with ExitStack() as undo:
            undo.callback(self._end, loop)
            if dozing is not None:
                dozing.rouse().result()
            source = receiver = None
            if self._open_source is not None:
                source = self._open_source()
                undo.callback(source.close)
                receiver = loop.engine.receiver(source, loop.within)
            undo.pop_all()
        self._limits, self._held = loop.engine.limits, Awake(loop, receiver, source)
        return self._held

    def _version(self) -> int:
        """Of the weights of the engine that there is."""
        if self._held is None:
            raise StaleWeightsError("there is no engine")
        return self._held.version()


def _pause_for_update(loop: EngineLoop, mode: PauseMode) -> None:
    """Have nothing generated; in a pause of the caller what is on its way waits, whatever the mode."""
    if loop.is_paused("caller"):
        return
    try:
        loop.pause(mode, "update").result()
    except GenerationError:  # the caller has paused meanwhile
        loop.pause("continue", "update").result()


def _go_on(state: Awake, why: BaseException | None) -> None:
    """End the pause of an update; or what waits for it, where there are no weights to go on with."""
    try:
        state.version()
    except StaleWeightsError as stale:
        state.loop.fail(why or stale).result()
    else:
        state.loop.resume("update").result()


def _pull(receiver: Receiver) -> WeightReceipt | None:
    return receiver.pull(missing_ok=True)
