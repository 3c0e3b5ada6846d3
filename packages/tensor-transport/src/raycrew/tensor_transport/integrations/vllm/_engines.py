"""What is asked of an engine, whichever of vLLM's two entry points it is used by."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import Any, Literal, Protocol

from raycrew.tensor_transport.errors import LoadRefusedError, TransportError

Requests = Literal["continue", "finish", "abort"]
"""What becomes of requests under way when new weights are loaded."""

_LOOK_S = 1.0  # How often it is looked whether a loop that is waited for still runs.
_EVERYTHING = {"reset_running_requests": True, "reset_connector": True}  # Whatever holds keys and values.
_MODES: dict[Requests, str] = {"continue": "keep", "finish": "wait", "abort": "abort"}


class Engine(Protocol):
    """An engine whose weights change."""

    def tell(self, info: dict[str, Any]) -> None:
        """Have each worker hear of something, between two steps."""
        ...

    def update(self, info: dict[str, Any]) -> None:
        """One update in each worker, from its start to its end."""
        ...

    def pause(self, requests: Requests) -> None:
        """No step of the model is made from here on.

        Raises:
            LoadRefusedError: Requests are to be finished, and somebody else has paused the engine.
        """
        ...

    def pause_again(self) -> None:
        """Pause what was paused, and may have gone on; requests that wait can't be finished first."""
        ...

    def forget(self) -> None:
        """Drop what was computed with other weights; requests under way compute it again.

        Raises:
            TransportError: A KV connector has kept something of it.
        """
        ...

    def name_version(self, version: str) -> None:
        """What outputs say of the tokens that are made from here on."""
        ...

    def resume(self) -> None:
        """Go on, unless somebody else had paused it before."""
        ...

    def abort(self) -> None:
        """End all requests that are under way."""
        ...


class OfflineEngine:
    """A `vllm.LLM`, called by one thread.

    Attributes:
        finished: Outputs of requests that were finished before an update, until somebody takes them.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._core = llm, llm.llm_engine
        self._is_in_process = not hasattr(self._core.engine_core, "call_utility")
        self._stays_paused = False
        self.finished: list[Any] = []

    def tell(self, info: dict[str, Any]) -> None:
        """See `Engine`."""
        self._llm.init_weight_transfer_engine({"init_info": info})

    def update(self, info: dict[str, Any]) -> None:
        """See `Engine`."""
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": info})
        self._llm.finish_weight_update()

    def pause(self, requests: Requests) -> None:
        """See `Engine`. In one process nothing happens between calls: it is done here."""
        self._stays_paused = self._core.is_sleeping()
        if not self._is_in_process:
            self._llm.sleep(level=0, mode=_MODES[requests])
            return
        if requests == "finish":
            self._check_can_finish()
            self.finish()
        elif requests == "abort":
            self.abort()
        self.pause_again()

    def pause_again(self) -> None:
        """See `Engine`."""
        self._llm.sleep(level=0, mode=_MODES["continue"])

    def _check_can_finish(self) -> None:
        if self._stays_paused and self._core.has_unfinished_requests():
            raise LoadRefusedError("requests under way can't be finished first: the engine is paused")

    def finish(self) -> None:
        """Make steps until all requests are done; `finished` has their outputs."""
        while self._core.has_unfinished_requests():
            self.finished += [output for output in self._core.step() if output.finished]

    def forget(self) -> None:
        """See `Engine`."""
        _check_dropped(self._llm.reset_prefix_cache(**_EVERYTHING))
        self._core.reset_encoder_cache()

    def name_version(self, version: str) -> None:
        """See `Engine`."""
        self._llm.update_weight_version(version)

    def resume(self) -> None:
        """See `Engine`."""
        if not self._stays_paused:
            self._llm.wake_up(tags=["scheduling"])

    def abort(self) -> None:
        """See `Engine`."""
        self._core.abort_request(list(self._core.output_processor.request_states), internal=True)


class OnlineEngine:
    """A `vllm.AsyncLLM`, whose event loop runs in another thread than the one that calls this."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._stays_paused = False

    def tell(self, info: dict[str, Any]) -> None:
        """See `Engine`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(
            lambda: self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        )

    def update(self, info: dict[str, Any]) -> None:
        """See `Engine`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._wait(self._engine.start_weight_update)
        self._wait(lambda: self._engine.update_weights(WeightTransferUpdateRequest(update_info=info)))
        self._wait(self._engine.finish_weight_update)

    def pause(self, requests: Requests) -> None:
        """See `Engine`."""
        self._stays_paused = self._wait(self._engine.is_paused)
        self._wait(lambda: self._engine.pause_generation(mode=_MODES[requests], clear_cache=False))

    def pause_again(self) -> None:
        """See `Engine`."""
        self._wait(lambda: self._engine.pause_generation(mode=_MODES["continue"], clear_cache=False))

    def forget(self) -> None:
        """See `Engine`."""
        _check_dropped(self._wait(lambda: self._engine.reset_prefix_cache(**_EVERYTHING)))
        self._wait(self._engine.reset_encoder_cache)

    def name_version(self, version: str) -> None:
        """See `Engine`."""
        self._wait(lambda: self._engine.update_weight_version(version))

    def resume(self) -> None:
        """See `Engine`."""
        if not self._stays_paused:
            self._wait(self._engine.resume_generation)

    def abort(self) -> None:
        """See `Engine`."""
        self._wait(lambda: self._engine.pause_generation(mode="abort", clear_cache=False))

    def _wait(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What a coroutine on the engine's loop returns.

        Raises:
            RuntimeError: This is the loop's own thread, which would wait for itself; or the loop has ended.
        """
        if _running_loop() is self._loop:
            raise RuntimeError("this blocks the engine's event loop: use asyncio.to_thread(...)")

        async def answer() -> Any:
            return await ask()

        asked = answer()
        future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        while not wait([future], timeout=_LOOK_S).done:
            if not self._loop.is_running():
                if inspect.getcoroutinestate(asked) == inspect.CORO_CREATED:
                    asked.close()
                raise RuntimeError("the engine's event loop has ended")
        return future.result()


def _check_dropped(is_dropped: bool) -> None:
    if not is_dropped:
        raise TransportError("the engine's KV connector did not drop what older weights had computed")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def engine_of(engine: Any, loop: asyncio.AbstractEventLoop | None) -> Engine:
    """What stands for an engine of vLLM here.

    Raises:
        TypeError: It is neither of the two, or an asynchronous one without its loop.
    """
    if hasattr(engine, "llm_engine"):
        return OfflineEngine(engine)
    if not hasattr(engine, "pause_generation"):
        raise TypeError(f"a vllm.LLM or a vllm.AsyncLLM is needed, not {type(engine).__name__}")
    if loop is None:
        raise TypeError("an AsyncLLM needs loop=, the event loop that it runs on")
    return OnlineEngine(engine, loop)
