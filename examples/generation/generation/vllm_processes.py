"""The processes that a vLLM engine may have: their answers have a deadline, and one that dies is noticed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

ENDED = "one of the engine's processes has ended by itself"
DOUBT_S = 2.0  # so long a process may take to die after it hung up on the others, which failed of that


class EngineProcesses:
    """Of one engine.

    Args:
        executor: vLLM's, of several processes.
        timeout_s: How long they may take to answer.
    """

    def __init__(self, executor: Any, timeout_s: float) -> None:
        self._executor, self._timeout_s = executor, timeout_s
        self._lost: Callable[[str], object] | None = None
        ask = executor.collective_rpc

        def ask_in_time(method: Any, timeout: float | None = None, *args: Any, **how: Any) -> Any:
            with self.needed(of_all=how.get("unique_reply_rank") is None):
                return ask(method, timeout_s if timeout is None else min(timeout, timeout_s), *args, **how)

        executor.collective_rpc = ask_in_time

    def watch(self, lost: Callable[[str], object]) -> None:
        """See `Engine.watch`."""
        self._lost = lost
        self._executor.register_failure_callback(lambda: self._lose(ENDED))

    @contextmanager
    def needed(self, of_all: bool = False) -> Iterator[None]:
        """Whatever fails within fails of a process that is lost, if there is one: that is told first.

        Where one of all that are to answer fails, vLLM takes what others say for answers to the next one.
        """
        try:
            yield
        except TimeoutError as error:
            self._lose(f"the engine's processes have not answered within {self._timeout_s:g} s ({error})")
            raise
        except Exception as error:
            if self._has_died():
                self._lose(f"{ENDED} ({error})")
            elif of_all:
                self._lose(f"one of the engine's processes failed where all were to answer ({error})")
            raise

    def _has_died(self) -> bool:
        if getattr(self._executor, "is_failed", False):
            return True
        sentinels = [process.sentinel for process in self._own()]
        return bool(sentinels and connection.wait(sentinels, DOUBT_S))

    def _lose(self, why: str) -> None:
        self._executor.is_failed = True  # no late answer is to be taken for that to the next question
        for process in self._own():  # also those that are stopped
            process.kill()
        if self._lost is not None:
            self._lost(why)

    def _own(self) -> list[BaseProcess]:
        """Children of this process; with the executor `ray` there are none."""
        workers = getattr(self._executor, "workers", None) or ()
        return [worker.proc for worker in workers if hasattr(worker, "proc")]
