"""Tensors of a version into all workers of an engine, and what they say of it."""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from raycrew.tensor_transport.errors import LoadRefusedError, TransportError, WeightUpdateError
from raycrew.tensor_transport.integrations.vllm._engines import engine_of
from raycrew.tensor_transport.integrations.vllm._outcomes import Mailbox, Outcome
from raycrew.tensor_transport.integrations.vllm._staging import Named, OwnProcess, SharedMemory, Stage, Told

logger = logging.getLogger(__name__)

_AHEAD_BYTES = 32 << 20  # A step of the engine may wait for as many to be packed, some milliseconds.

Run = Callable[[Callable[[], object]], object]
"""Runs what calls an engine at a moment when nobody else does."""


class EngineLoadError(WeightUpdateError):
    """Workers of an engine could not load what they were given.

    Attributes:
        ranks: Which, over all data-parallel replicas.
    """

    ranks: Sequence[int] = ()


class EngineLoader:
    """Loads tensors into all workers of an engine: the `load` of a `WeightReceiver` of one's own.

    Who calls it sees to what `VllmWeights` does else: that the engine makes no step meanwhile, that its
    prefix cache is reset, and that a mixture is not served. The receiver takes `verify_first=True`
    and a rollback.

    Args:
        engine: A `vllm.LLM`; or a `vllm.AsyncLLM`, with `loop`.
        loop: The event loop of an `AsyncLLM`, which runs in another thread.

    Raises:
        TypeError: That is no engine, or its loop is missing.
        EngineLoadError: Not all workers answer: its back end is another one, or they are on other nodes. Or
            one has a KV connector without a `reset_cache`.

    Attributes:
        engine: What stands for the engine.
    """

    def __init__(self, engine: Any, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.engine = engine_of(engine, loop)
        self._mailbox = Mailbox()
        self._serials = itertools.count(1)
        with contextlib.ExitStack() as undo:
            undo.callback(self._mailbox.close)
            in_process = [one.pid for one in self._tell()] == [os.getpid()]
            self._stage: Stage = OwnProcess() if in_process else SharedMemory()
            undo.pop_all()

    def __call__(self, weights: Iterable[Named]) -> None:
        """Load all tensors of a model, named as in a checkpoint.

        Raises:
            LoadRefusedError: The workers can't be given them; nothing has changed.
            EngineLoadError: Some workers failed, and all hold a mixture.
        """
        with self.staged(list(weights)) as load:
            load()

    @contextlib.contextmanager
    def staged(self, weights: Sequence[Named]) -> Iterator[Callable[[], None]]:
        """Have tensors within reach of the workers; what is yielded loads them, and may be called once.

        Raises:
            LoadRefusedError: There is no room for them.
            EngineLoadError: When what is yielded is called: some workers failed, and all hold a mixture.
        """
        with contextlib.ExitStack() as lent:
            try:
                told = lent.enter_context(self._stage.lend(weights))
            except TransportError as error:
                raise LoadRefusedError(f"the engine's workers can't be given the weights: {error}") from error
            yield lambda: self._update(told)

    def ahead(self) -> "Ahead":
        """What makes a version ready in the workers, beside the one that they compute with."""
        return Ahead(self._stage, self._tell, self._update)

    def close(self) -> None:
        """Give back what is held; idempotent."""
        self._stage.close()
        self._mailbox.close()

    def _update(self, told: Told | None = None) -> None:
        """Load tensors; those that were made ready unless others are given."""
        serial = next(self._serials)
        self.engine.update({"folder": self._mailbox.folder, "serial": serial, "told": told or {}})
        self._checked(self._heard(serial))

    def _tell(self, told: Told | None = None, *, begins: bool = False, ends: bool = False) -> list[Outcome]:
        """Have tensors made ready; without any, forget those that are."""
        serial = next(self._serials)
        info = {"folder": self._mailbox.folder, "serial": serial, "told": told or {}}
        self.engine.tell(info | {"begins": begins, "ends": ends})
        return self._checked(self._heard(serial))

    @staticmethod
    def _checked(outcomes: list[Outcome]) -> list[Outcome]:
        if failed := [one for one in outcomes if one.error is not None]:
            error = EngineLoadError(
                f"{len(failed)} of {len(outcomes)} workers of the engine can't take the weights: rank "
                f"{failed[0].rank}: {failed[0].error}"
            )
            error.ranks = tuple(one.rank for one in failed)
            raise error
        return outcomes

    def _heard(self, serial: int) -> list[Outcome]:
        """What all workers say."""
        outcomes = self._mailbox.read(serial)
        members = outcomes[0].members if outcomes else 0
        if len(outcomes) == members > 0:
            return outcomes
        raise EngineLoadError(
            f"{len(outcomes)} of {members or 'all'} workers of the engine answer: they have to be on this "
            "node, with no other client since, and the engine's back end "
            "weight_transfer_config=WeightTransferConfig(backend='raycrew')"
        )


class Ahead:
    """A version on its way into all workers, beside the one that they compute with.

    Args:
        stage: Has tensors at hand for them.
        tell: Says where, which are the first and which the last; without any, that they are not wanted. The
            engine must make no step meanwhile, and may before and after.
        update: Has workers compute with those that were made ready.
    """

    def __init__(self, stage: Stage, tell: Callable[..., object], update: Callable[[], object]) -> None:
        self._stage, self._tell, self._update = stage, tell, update
        self._lent = contextlib.ExitStack()
        self._is_begun = False

    def add(self, weights: Sequence[Named], run: Run) -> None:
        """Make more of it ready.

        Args:
            weights: The tensors.
            run: Runs what calls the engine.

        Raises:
            EngineLoadError: Workers can't; they have forgotten it.
            LoadRefusedError: There is no room for them; likewise.
        """
        with self._dropped_if_it_fails(run):
            try:
                told = self._lent.enter_context(self._stage.lend(weights))
            except TransportError as error:
                raise LoadRefusedError(f"the engine's workers can't be given the weights: {error}") from error
            begins, self._is_begun = not self._is_begun, True
            run(lambda: self._tell(told, begins=begins))

    def end(self, run: Run) -> None:
        """All of it was added.

        Raises:
            EngineLoadError: The model needs more; the workers have forgotten it.
        """
        with self._dropped_if_it_fails(run):
            run(lambda: self._tell(ends=True))

    def exchange(self) -> None:
        """Have the engine compute with it: no step of it is under way, and all of it was added.

        Raises:
            EngineLoadError: Some workers failed, and all hold a mixture.
        """
        self._is_begun = False
        with self._lent:
            self._update()

    def drop(self, run: Run) -> None:
        """Forget it; idempotent."""
        is_begun, self._is_begun = self._is_begun, False
        if is_begun:
            try:
                run(self._tell)
            except Exception:  # What failed before counts; and the workers may be gone.
                logger.warning("workers may keep an update in memory until the next one", exc_info=True)
        self._lent.close()

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, run: Run) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop(run)
            raise


def portions(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    """Tensors, as many at a time as may be made ready in one go."""
    some: list[Named] = []
    size = 0
    for name, tensor in tensors:
        some.append((name, tensor))
        size += tensor.nbytes
        if size >= _AHEAD_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
