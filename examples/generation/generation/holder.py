"""What a generation worker says of its engine, and has it do between two steps."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial

from generation.checking import WeightReport, check_weights
from generation.errors import GenerationError
from generation.life import EngineLife
from generation.metrics import GenerationMetrics
from generation.modes import PauseMode
from generation.prompts import Limits
from raycrew.tensor_transport.integrations.vllm import GreedyReference


class EngineHolder:
    """Has an engine, or lends its bundle to one.

    Attributes:
        on_update: What becomes of samples on their way when weights are replaced.
    """

    on_update: PauseMode
    _engine: EngineLife | None

    @property
    def _life(self) -> EngineLife:
        if self._engine is None:
            raise GenerationError(
                "this worker lends its bundle to the engine of its tied group: ask the leader"
            )
        return self._engine

    async def metrics(self) -> GenerationMetrics:
        """What it is at; answered between two steps."""
        state = self._life.state
        if state is None:
            return GenerationMetrics("asleep", None)
        load, counts = await asyncio.wrap_future(state.loop.load()), state.loop.counts
        return GenerationMetrics(
            state.loop.condition,
            state.known_version(),
            load.running,
            load.waiting,
            load.kv_cache_use,
            counts.tokens,
            counts.tokens / counts.seconds if counts.seconds else 0.0,
            counts.finished,
            counts.aborted,
        )

    async def limits(self) -> Limits:
        """What the model can take."""
        return self._life.limits

    async def pid(self) -> int:
        """This worker's process."""
        return os.getpid()

    async def explain(self) -> str:
        """What the engine is, what its sleep is, and how it is."""
        state = self._life.state
        if state is None:
            return f"asleep: {self._life.asleep}, with the latest version of the weights"
        version = state.known_version()
        held = "no version of the weights" if version is None else f"version {version} of the weights"
        return f"{state.loop.engine.explain()}; it holds {held}, and on an update samples {self.on_update}"

    async def check(
        self,
        references: Sequence[GreedyReference],
        *,
        digest: str | None = None,
        tolerance: float | None = None,
    ) -> WeightReport:
        """Compare what the engine computes with the trainer's own forward pass, as after an update.

        Args:
            references: By `greedy_references` where the trainer's model is, of the weights that are held.
            digest: `digest_weights` of what the trainer has published.
            tolerance: Most that log-probabilities may differ: 1e-4 in float32, about 0.1 in bfloat16. None to
                tell how they differ, and of other tokens, and raise nothing.

        Raises:
            WeightCheckError: The digest is another one; or, where there is a tolerance, tokens are others, or
                log-probabilities differ by more than that.
            GenerationError: Samples ended early, or an update came meanwhile.
            Exception: As `generate`.
        """
        return await check_weights(self._life, references, digest, tolerance)

    async def reset_prefix_cache(self) -> None:
        """Forget keys and values of prompts that have ended."""
        loop = self._life.awake.loop
        await asyncio.wrap_future(loop.call(loop.engine.reset_prefix_cache))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder, for samples that name it; in place of one that has the name.

        Samples that are under way with that one end as aborted, as none has tokens of both; `pause("finish")`
        before has them end by themselves.

        Raises:
            RefusedError: The engine has no adapters, was made without (`max_adapters`), or can't load this
                one: that of the same name stays.
        """
        loop = self._life.awake.loop
        await asyncio.wrap_future(loop.change_adapter(name, partial(loop.engine.load_adapter, name, path)))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; samples that are under way with it end as aborted.

        Raises:
            RefusedError: There is none of that name.
        """
        loop = self._life.awake.loop
        await asyncio.wrap_future(loop.change_adapter(name, partial(loop.engine.unload_adapter, name)))
