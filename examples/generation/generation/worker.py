"""A worker that generates: what all of them do, whatever engine they have."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from generation.calls import Asked, admitted, samples_of
from generation.engine import Engine, Request, Store, StoreMaker, WeightSource
from generation.errors import RefusedError
from generation.holder import EngineHolder
from generation.life import EngineLife
from generation.modes import PAUSE_MODES, PauseMode, check_mode
from generation.openai.hosting import Hosted
from generation.openai.options import EndpointOptions
from generation.options import EngineOptions, check_device
from generation.samples import Sample, pack_samples
from generation.sampling import Sampling
from raycrew.tensor_transport import BatchedDataDict, WeightDirectory, WeightReceipt, WeightUpdate
from raycrew.worker_groups import CurrentWorker, WorkerGroupError, current_worker
from raycrew.worker_groups.services import Endpoint

logger = logging.getLogger(__name__)
How = Sampling | Mapping[str, Any] | None


class GenerationWorker(EngineHolder, ABC):
    """Generates with an engine, under weights that may be replaced while it does.

    Any number of calls may be on their way at a time; the engine generates for all of them together. Samples
    wait in a pause. Where a `directory` is given, nothing is generated before the first version has come.

    Args:
        options: The engine to be made.
        directory: Where versions of the weights are found; None to keep those that the engine is made with.
        store: Where their bytes are found, as for `WeightReceiver`; or what makes that in this process, for
            each engine anew, such as the class `RouteStore`, with which it takes part in a `WeightRoute`.
        on_update: What becomes of samples on their way when weights are replaced: all end first ("finish"),
            they end as they are ("abort"), or they go on under the new weights ("continue"), with keys and
            values computed anew, so that each token's log-probability is that of the version that it names.
        leads: Whether it has the engine of its tied group; the others lend their bundles to its processes,
            have nothing to put to sleep or wake, and refuse all calls but `pid`.
        asleep: Whether it has no engine before `wake`.
        variables: What this process has in its environment before the engine is made.
        endpoint: What answers over HTTP in OpenAI's form, from a thread; None for nothing of the kind.
        ends_with_engine: Whether this process ends where the engine loses one of its own, so that its group
            replaces it as any that was killed. Else samples fail until `wake` makes a new engine.

    Raises:
        RefusedError: The engine, or this machine, can't do what the options ask for; or the endpoint has no
            tokenizer.
        ValueError: There is no such mode.
    """

    def __init__(
        self,
        options: EngineOptions,
        directory: WeightDirectory | None = None,
        store: Store | StoreMaker | None = None,
        on_update: PauseMode = "continue",
        leads: bool = True,
        asleep: bool = False,
        variables: Mapping[str, str] | None = None,
        endpoint: EndpointOptions | None = None,
        ends_with_engine: bool = False,
    ) -> None:
        check_mode(on_update, PAUSE_MODES)
        me = _own_worker()
        if options.executor != "ray":  # then the devices are not this worker's, and the engine knows
            check_device(options, "cpu" if me is None else me.device_kind)
        os.environ.update(variables or {})
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.options, self.on_update = options, on_update
        self._ends_with_engine = ends_with_engine
        name = None if me is None else f"{me.group_name} {me.rank}"
        self._seeds = _seeds_of(options.seed, *(() if me is None else (me.rank, me.generation)))
        if directory is None and options.sleep_level is not None:
            raise RefusedError("an engine with a sleep_level wakes with weights of a directory: give one")
        source = None if directory is None else partial(WeightSource.open, directory, store, name)
        self._hosted = Hosted(options, endpoint if leads else None)
        self._engine = EngineLife(self._made, source, asleep) if leads else None
        if self._engine is not None:
            self._hosted.begin(self._engine)

    @abstractmethod
    def create_engine(self, seed: int) -> Engine:
        """Make the engine of `options`; called in the thread that owns it.

        Args:
            seed: Of what is sampled without a seed; another one on each worker, and for each engine of it.
        """

    # Generation

    async def generate(
        self,
        batch: BatchedDataDict,
        sampling: How = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> BatchedDataDict:
        """Sample from each prompt of a batch.

        Args:
            batch: Its prompts; see `read_prompts` for the columns.
            sampling: How tokens are chosen, for all prompts: `Sampling`, or its options by name.
            request_id: What `abort` calls these samples.
            adapter: Name of a loaded LoRA adapter to sample with.

        Returns:
            A row for each sample, those of a prompt side by side; see `pack_samples` for the columns.

        Raises:
            PromptError: The engine can't take a prompt.
            SamplingError: There is no such option, or a value is out of its range.
            RefusedError: There is no such adapter.
            AsleepError: The generator sleeps.
            StaleWeightsError: It holds no version of the weights yet, or a mixture.
            EngineFailedError: The engine raised.
        """
        async with contextlib.aclosing(self._samples(batch, sampling, request_id, adapter)) as samples:
            found = [sample async for sample in samples]
        return pack_samples([sample for _, sample in sorted(found, key=_place)])

    async def generate_async(
        self,
        batch: BatchedDataDict,
        sampling: How = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[BatchedDataDict]:
        """The samples of `generate` as they end, each a batch of one row.

        Who closes the generator early aborts the rest.

        Yields:
            `prompt_index` and `sample_index` say whose each is.

        Raises:
            Exception: As `generate`.
        """
        async with contextlib.aclosing(self._samples(batch, sampling, request_id, adapter)) as samples:
            async for _, sample in samples:
                yield pack_samples([sample])

    async def abort(self, request_id: str | None = None) -> int:
        """End the samples of a call, or all: they are returned as they are, with finish reason "abort".

        Returns:
            How many these were.
        """
        state = self._life.state
        return 0 if state is None else await asyncio.wrap_future(state.loop.abort(request_id))

    async def pause(self, mode: PauseMode = "continue") -> None:
        """Generate nothing until `resume`; new samples wait. Returns once that is so.

        Args:
            mode: Samples on their way end first ("finish"), end as they are ("abort"), or wait ("continue").

        Raises:
            ValueError: There is no such mode.
            GenerationError: `resume`, or another pause, came before those on their way had ended.
        """
        check_mode(mode, PAUSE_MODES)
        await asyncio.wrap_future(self._life.awake.loop.pause(mode, "caller"))

    async def resume(self) -> None:
        """Go on after a pause; without one it does nothing."""
        await asyncio.wrap_future(self._life.awake.loop.resume("caller"))

    # Weights

    async def apply_weights(self, update: int | WeightUpdate) -> WeightReceipt:
        """Replace the weights, as `sync_weights` asks; samples on their way fare as `on_update` says.

        Where the weights are left a mixture, samples on their way fail with the same error.

        In a pause, whatever waits goes on under the new weights afterwards.

        Raises:
            AsleepError: The generator sleeps; it takes the latest version when it wakes.
            WeightUpdateError: As `WeightReceiver.apply`.
        """
        return await asyncio.to_thread(
            self._life.update, lambda receiver: receiver.apply(update), self.on_update
        )

    async def set_on_update(self, mode: PauseMode) -> None:
        """What becomes of samples on their way at the next updates; see `on_update`.

        Raises:
            ValueError: There is no such mode.
        """
        check_mode(mode, PAUSE_MODES)
        self.on_update = mode

    async def prepare_weights(self, version: int) -> WeightReceipt:
        """Fetch a version while samples go on, so that `apply_weights` only loads it."""
        return await asyncio.to_thread(self._life.receiver.prepare, version)

    async def join_route(self, told: Any) -> Any:
        """Take part in what a `WeightRoute` chose for all; after a restart or a sleep, again.

        Raises:
            AsleepError: The generator sleeps.
            GenerationError: It has no `RouteStore`.
            GroupError: Not all members joined.
        """
        return await asyncio.to_thread(self._life.join_route, told)

    def on_generation(self, worker: CurrentWorker) -> None:  # noqa: ARG002 - a group calls it so
        """Take the latest version where none is held: after a restart, or in a group that was made later."""
        if self._engine is not None:
            with ThreadPoolExecutor(1) as apart:  # Ray warns of waits in the event loop's own thread
                apart.submit(self._engine.catch_up, self.on_update).result()

    # Life

    async def sleep(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Give up the engine with its model and memory, until `wake`; asleep already is a success.

        Args:
            mode: Samples on their way end first ("finish") or as they are ("abort"). Those that wait for the
                end of a pause are aborted.

        Raises:
            ValueError: There is no such mode.
            GenerationError: Samples on their way wait in a pause, also one that comes later, and are to end
                first; or the engine did not end, and has what it has: its worker is to be ended.
        """
        check_mode(mode, ("finish", "abort"))
        if self._engine is not None:
            await asyncio.to_thread(self._engine.sleep, mode)

    async def wake(self) -> None:
        """Make an engine again, with the latest version of the weights; awake already is a success.

        One that has failed is given up, and another one made.
        """
        if self._engine is not None:
            await asyncio.to_thread(self._engine.wake)

    # Over HTTP

    async def load_adapter(self, name: str, path: str) -> None:
        """As `EngineHolder` does; clients of an endpoint call the model by that name.

        Raises:
            RefusedError: As there; or they call the model itself so.
        """
        self._hosted.check_adapter(name)
        await super().load_adapter(name, path)

    async def endpoint(self) -> Endpoint:
        """Where it answers over HTTP; that ends with the worker.

        Raises:
            GenerationError: Nowhere.
        """
        me = _own_worker()
        return replace(self._hosted.endpoint, rank=0 if me is None else me.rank)

    async def close_endpoint(self) -> None:
        """Answer over HTTP no more; requests under way are aborted. Idempotent."""
        await asyncio.to_thread(self._hosted.close)

    # Inside

    def _made(self) -> Engine:
        engine = self.create_engine(next(self._seeds))
        if self._ends_with_engine:
            engine.watch(_end_this_process)
        return engine

    async def _samples(
        self, batch: BatchedDataDict, sampling: How, request_id: str | None, adapter: str | None
    ) -> AsyncGenerator[tuple[Request, Sample], None]:
        """What was asked for, and what came of it, as it ends."""
        asked = Asked(batch, Sampling.of(sampling), request_id, adapter)
        loop, requests = await admitted(self._life, asked)
        async with contextlib.aclosing(samples_of(loop, requests)) as samples:
            async for pair in samples:
                yield pair


def _end_this_process(why: str) -> None:
    logger.critical("%s: this worker ends, too", why)
    os._exit(1)


def _seeds_of(*of: int) -> Iterator[int]:
    """One after another, of 32 bits: no engine samples what one before it, or of another worker, did."""
    for number in itertools.count():
        digest = hashlib.blake2b(repr((*of, number)).encode(), digest_size=4).digest()
        yield int.from_bytes(digest)


def _place(pair: tuple[Request, Sample]) -> int:
    return int(pair[0].id)


def _own_worker() -> CurrentWorker | None:
    try:
        return current_worker()
    except WorkerGroupError:  # used without a group
        return None
