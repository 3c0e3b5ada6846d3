"""Tensors of a version into all workers of an engine, and what they say of it."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.integrations.vllm._engines import Engine
from raycrew.tensor_transport.integrations.vllm._outcomes import Mailbox, Outcome
from raycrew.tensor_transport.integrations.vllm._staging import Named, OwnProcess, SharedMemory, Stage


class EngineLoadError(WeightUpdateError):
    """Workers of an engine could not load what they were given.

    Attributes:
        ranks: Which, over all data-parallel replicas.
    """

    ranks: Sequence[int] = ()


class Delivery:
    """The way to the workers of one engine.

    Args:
        engine: Whose.

    Raises:
        EngineLoadError: Not all workers answer: its back end is another one, or they are on other nodes.

    Attributes:
        is_intact: Whether the workers hold what was loaded last, whole.
        in_process: Whether the engine's one worker is this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mailbox = Mailbox()
        self._serials = itertools.count(1)
        self.is_intact = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._mailbox.close)
            engine.initialise({"folder": self._mailbox.folder})
            outcomes = self._heard(0)
            self.in_process = [one.pid for one in outcomes] == [os.getpid()]
            self._stage: Stage = OwnProcess() if self.in_process else SharedMemory()
            undo.pop_all()

    @contextlib.contextmanager
    def staged(self, weights: Sequence[Named]) -> Iterator[Callable[[], None]]:
        """Have tensors within reach of the workers; what is yielded loads them.

        Raises:
            EngineLoadError: When it is called: some workers failed, and all hold a mixture.
        """
        with self._stage.lend(weights) as told:
            yield lambda: self._load({"serial": next(self._serials), "told": told})

    def close(self) -> None:
        """Give back what is held; idempotent."""
        self._stage.close()
        self._mailbox.close()

    def _load(self, info: dict[str, object]) -> None:
        self.is_intact = False
        self._engine.update(info)
        outcomes = self._heard(int(str(info["serial"])))
        if failed := [one for one in outcomes if one.error is not None]:
            error = EngineLoadError(
                f"{len(failed)} of {len(outcomes)} workers of the engine could not load the weights: rank "
                f"{failed[0].rank}: {failed[0].error}"
            )
            error.ranks = tuple(one.rank for one in failed)
            raise error
        self.is_intact = True

    def _heard(self, serial: int) -> list[Outcome]:
        """What all workers say."""
        outcomes = self._mailbox.read(serial)
        members = outcomes[0].members if outcomes else 0
        if len(outcomes) == members > 0:
            return outcomes
        raise EngineLoadError(
            f"{len(outcomes)} of {members or 'all'} workers of the engine answer: they have to be on this "
            "node, and the engine's back end weight_transfer_config=WeightTransferConfig(backend='raycrew')"
        )
