"""The weights of one running engine."""

import asyncio
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from raycrew.tensor_transport._bytes import Belonging
from raycrew.tensor_transport.errors import LoadRefusedError, StaleWeightsError
from raycrew.tensor_transport.integrations.vllm._checking import GreedyReference, compare_greedy
from raycrew.tensor_transport.integrations.vllm._delivery import (
    Ahead,
    EngineLoader,
    EngineLoadError,
    Run,
    portions,
)
from raycrew.tensor_transport.integrations.vllm._engines import OfflineEngine, Requests
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightReceipt, WeightReceiver, WeightUpdate

_T = TypeVar("_T")
_Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


class VllmWeights(Belonging):
    """Brings versions of a trainer's weights into a running vLLM engine, through vLLM's weight transfer.

    The engine is made with `weight_transfer_config=WeightTransferConfig(backend="raycrew")`; its processes
    find the back end by themselves. All of a version is fetched and verified while the engine serves; then it
    pauses, each worker loads its own slices, or takes those that it has packed before (`between_steps`), the
    prefix cache is dropped, and it goes on. If a worker fails, or another generator of the same
    `sync_weights`, all workers load the version before again. Where that fails, too, the weights are a
    mixture: requests under way are aborted, and `require` and `tag`, which every generation has to ask first,
    refuse with StaleWeightsError until a version was loaded whole.

    vLLM's own `weight_versions` of outputs say which tokens were made with which version.

    Args:
        engine: A `vllm.LLM`; or a `vllm.AsyncLLM`, with `loop`, and this object is used by another thread.
        requests: What becomes of requests under way: "continue" under the new weights (what was computed with
            the old ones is computed anew), "finish" before, or "abort". With an `LLM` in one process,
            `take_finished` has the outputs of those that were finished.
        loop: The event loop of an `AsyncLLM`.
        directory: Where versions are found by number.
        store: Where the buckets are; see `WeightReceiver`, as for the following.
        expected: Names, shapes and dtypes of the trainer's tensors; those of the first version unless given.
        borrow: Hand on the store's own memory, which vLLM only reads; else a copy is made of each bucket.
        verify: Compare checksums.
        rollback: How the version before comes back: "shadow" keeps it, "refetch" fetches it again.
        name: What the directory calls this receiver.
        between_steps: Have the workers of an engine on CPUs pack a version's weights beside those that they
            compute with, while `prepare_weights` fetches them: the engine then pauses only for an exchange of
            the two. It takes the memory of one more model in the workers. Called in the thread that prepares
            with each piece of that work, of some milliseconds: it has to run it, in any thread, while nobody
            else calls the engine, and to return when it is done. For an `AsyncLLM`, which takes calls at any
            time, and for an `LLM` of one thread `operator.call` does so. A thread that runs the work must not
            wait for other methods of this object while a version is prepared. Where a model has layers that
            can't be packed ahead, all is loaded in the pause.

    Raises:
        TypeError: That is no engine, or its loop is missing.
        EngineLoadError: Its workers do not answer to this back end, or have a KV connector that can't drop
            what older weights computed.
        ValueError: There is no such rollback, or nothing of the kind for requests.
    """

    def __init__(
        self,
        engine: Any,
        *,
        requests: Requests = "continue",
        loop: asyncio.AbstractEventLoop | None = None,
        directory: WeightDirectory | None = None,
        store: ByteStore | PullTransport | None = None,
        expected: Mapping[str, torch.Tensor] | None = None,
        borrow: bool = True,
        verify: bool = True,
        rollback: Literal["shadow", "refetch", "none"] = "shadow",
        name: str | None = None,
        between_steps: Run | None = None,
    ) -> None:
        if requests not in ("continue", "finish", "abort"):
            raise ValueError(f"requests must be 'continue', 'finish' or 'abort', got {requests!r}")
        self._raw, self._requests = engine, requests
        self._names: frozenset[str] = frozenset(expected or ())
        self._is_paused = self._is_stuck = False
        self._between_steps = between_steps
        self._ahead: Ahead | None = None
        self._loader = EngineLoader(engine, loop=loop)
        self._engine = self._loader.engine
        try:
            self._receiver = WeightReceiver(
                self._load,
                expected=expected,
                store=store,
                borrow=borrow,
                verify_first=True,
                verify=verify,
                rollback=rollback,
                directory=directory,
                name=name,
                ahead=None if between_steps is None else self._go_ahead,
            )
        except BaseException:
            self._loader.close()
            raise
        super().__init__()

    @property
    def version(self) -> int | None:
        """The version of the last update that was applied whole, None before the first."""
        return self._receiver.version

    @property
    def intact(self) -> bool:
        """Whether the engine's weights are those of `version`."""
        return self._receiver.intact

    def require(self, version: Any = None) -> int:
        """The version, if the engine may serve; see `WeightReceiver.require`.

        Raises:
            StaleWeightsError: It holds none yet, an older one than is required, or a mixture; or the engine
                stays paused, as it did not go on after an update.
        """
        self._check_goes_on()
        return self._receiver.require(version)

    def tag(self, rows: int) -> torch.Tensor:
        """The version for each of so many rows, int64 [rows]; raises as `require` does."""
        self._check_goes_on()
        return self._receiver.tag(rows)

    def prepare_weights(self, version: int, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Fetch and verify a version while the engine serves; `apply_weights` then only loads it.

        Where it comes to an earlier version first, the engine pauses for that, and goes on.

        Raises:
            WeightUpdateError: See `WeightReceiver.prepare`.
        """
        self._check_process()
        with self._lock, self._resuming():
            return self._receiver.prepare(version, timeout_s=timeout_s)

    def apply_weights(self, version: WeightUpdate | int, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Bring a version into the engine, whole or not at all.

        Args:
            version: Its number in the directory, or a `WeightUpdate`.
            timeout_s: Deadline of fetching it, and of hearing that it counts.

        Raises:
            EngineLoadError: As the cause: workers failed.
            WeightUpdateError: See `WeightReceiver.apply`; `intact` says whether the engine is back at
                `current_version`, and may serve.
        """
        return self._change(lambda: self._receiver.apply(version, timeout_s=timeout_s))

    def pull(self, *, timeout_s: float | None = 600.0, missing_ok: bool = False) -> WeightReceipt | None:
        """Come to the latest version, after a restart or a failure; see `WeightReceiver.pull`.

        Raises:
            WeightUpdateError: As `apply_weights`.
        """
        return self._change(lambda: self._receiver.pull(timeout_s=timeout_s, missing_ok=missing_ok))

    def check(self, references: Sequence[GreedyReference], *, tolerance: float = 1e-4) -> float:
        """Compare what the engine computes with the trainer's own forward pass, for a `vllm.LLM`.

        Args:
            references: By `greedy_references`, made of the weights that are held.
            tolerance: Of log-probabilities: 1e-4 in float32, about 0.1 in bfloat16.

        Returns:
            The largest difference of log-probabilities.

        Raises:
            WeightCheckError: Tokens, or log-probabilities by more than that, differ.
            StaleWeightsError: See `require`.
            TypeError: The engine is asynchronous: use `compare_greedy` on what it generates.
        """
        if not isinstance(self._engine, OfflineEngine):
            raise TypeError("check() is for a vllm.LLM; compare_greedy() takes what an AsyncLLM generates")
        self.require()
        return compare_greedy(references, [self._greedy(one) for one in references], tolerance)

    def take_finished(self) -> list[Any]:
        """Outputs of requests that were finished before an update, with an `LLM` in one process."""
        if not isinstance(self._engine, OfflineEngine):
            return []
        finished, self._engine.finished = self._engine.finished, []
        return finished

    def close(self) -> None:
        """Leave the directory, and give back what is held; the engine goes on as it is. Idempotent.

        In a forked child it does nothing.
        """
        if self._is_parents:
            return
        with self._lock:
            self._receiver.close()
            self._drop_ahead(self._between)
            self._loader.close()

    def _change(self, change: Callable[[], _T]) -> _T:
        self._check_process()
        with self._lock, self._resuming():
            try:
                return change()
            finally:
                self._drop_ahead(operator.call)

    @contextlib.contextmanager
    def _resuming(self) -> Iterator[None]:
        """An engine that was paused within the context goes on after it, with nothing of other weights."""
        try:
            yield
        except BaseException as error:
            _try_after(error, self._resume)
            raise
        self._resume()

    def _resume(self) -> None:
        if not self._is_paused:
            return
        self._hold()
        self._is_stuck = True
        if self._receiver.intact:
            self._engine.forget()
            self._engine.name_version(str(self._receiver.version))
        else:
            self._engine.abort()
        self._go_on()

    def _go_on(self) -> None:
        self._engine.resume()
        self._is_paused = self._is_stuck = False

    def _hold(self) -> None:
        """Pause again what may have gone on, though that raised."""
        if self._is_stuck:
            self._engine.pause_again()

    def _check_goes_on(self) -> None:
        if self._is_stuck:
            raise StaleWeightsError(
                "the engine stays paused: after an update it did not drop what older weights had computed, "
                "or did not go on; update it again, or start it anew",
                current_version=self.version,
                intact=self.intact,
            )

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """What the receiver loads into: a version's tensors, or those of the version before."""
        weights = list(tensors)
        self._check_whole(weights)
        with self._loader.staged(weights) as load:
            self._pause()
            load()
        self._names = frozenset(name for name, _ in weights)

    def _go_ahead(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> _Load | None:
        """What the receiver calls with what it fetches; what loads that then, None where it can't be so."""
        self._drop_ahead(self._between)
        ahead = self._ahead = self._loader.ahead()
        try:
            for some in portions(tensors):
                ahead.add(some, self._between)
            ahead.end(self._between)
        except (EngineLoadError, LoadRefusedError):  # To load it tells what is wrong with it, if anything is.
            return None
        except BaseException:
            self._drop_ahead(self._between)
            raise
        return partial(self._exchange, ahead)

    def _exchange(self, ahead: Ahead, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """What the receiver loads with in place of `_load`: the same tensors."""
        if ahead is not self._ahead:  # It was dropped meanwhile.
            self._load(tensors)
            return
        weights = list(tensors)
        self._check_whole(weights)
        self._pause()
        ahead.exchange()
        self._ahead, self._names = None, frozenset(name for name, _ in weights)

    def _drop_ahead(self, run: Run) -> None:
        """Have the workers forget a version that is not loaded after all."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop(run)

    def _between(self, work: Callable[[], object]) -> None:
        """Have work done between steps of the engine."""
        if self._between_steps is not None:
            done: list[object] = []
            self._between_steps(lambda: done.append(work()))
            if not done:
                raise TypeError("between_steps= has to return when it has run what it is given, not before")

    def _pause(self) -> None:
        if self._is_paused:
            self._hold()
            return
        self._is_paused = True  # Whoever is interrupted from here on has it go on.
        try:
            self._engine.pause(self._requests)
        except BaseException as error:  # It may be paused, or be so in a moment.
            self._is_stuck = True
            _try_after(error, self._go_on)
            raise

    def _check_whole(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        if missing := self._names - {name for name, _ in weights}:
            raise LoadRefusedError(
                f"an engine takes whole models, and the update lacks {sorted(missing)[:5]}: publish it whole"
            )

    def _greedy(self, reference: GreedyReference) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams

        how = SamplingParams(
            temperature=0, max_tokens=len(reference.tokens), logprobs=0, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": list(reference.prompt)}
        (answer,) = self._raw.generate([prompt], how, use_tqdm=False)
        (sample,) = answer.outputs
        tokens = list(sample.token_ids)
        return tokens, [at[token].logprob for at, token in zip(sample.logprobs, tokens, strict=True)]


def _try_after(error: BaseException, resume: Callable[[], None]) -> None:
    """Have an engine go on after an error, which is raised whether it does so or not."""
    try:
        resume()
    except Exception as second:  # noqa: BLE001 - the first error is raised
        error.add_note(f"the engine did not go on, and stays paused: {second!r}")
