"""Passes over the rows of a batch, in order or shuffled, that can be taken up where they were left."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._rows.counts import whole_number
from raycrew.tensor_transport._rows.indexing import Rows


@dataclass(frozen=True)
class Passes:
    """Which rows come in which step of which pass: a pure function of these numbers.

    Attributes:
        size: Rows of the batch.
        batch_size: Rows of a step.
        shuffle: Whether each pass has an order of its own.
        seed: What the orders depend on, besides the number of the pass.
        drop_last: Whether a pass ends before a step that would have fewer rows.
    """

    size: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, least in (("size", 0), ("batch_size", 1), ("seed", 0)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, least=least))
        for name in ("shuffle", "drop_last"):
            object.__setattr__(self, name, bool(getattr(self, name)))

    @property
    def steps(self) -> int:
        """Steps of one pass."""
        whole, rest = divmod(self.size, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def order(self, epoch: int) -> npt.NDArray[np.int64] | None:
        """The rows of one pass in their order; None where they are not shuffled.

        It is the same with every version of numpy: only the raw numbers of a generator are promised to be.
        """
        if not self.shuffle:
            return None
        numbers = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.size)
        return np.argsort(np.asarray(numbers, dtype=np.uint64), kind="stable")

    def rows(self, step: int, order: npt.NDArray[np.int64] | None) -> Rows:
        """The rows of one step of a pass with that order."""
        start = step * self.batch_size
        stop = min(start + self.batch_size, self.size)
        return slice(start, stop, 1) if order is None else order[start:stop]

    def check_state(self, state: Mapping[str, Any], epochs: int | None) -> tuple[int, int]:
        """The pass and the step at which a saved position is.

        Raises:
            ValueError: It is no position in these passes; the error says what differs.
        """
        wanted = vars(self) | {"epoch": None, "step": None}
        if set(state) != set(wanted):
            raise ValueError(f"a saved position has {sorted(wanted)}, not {sorted(map(str, state))}")
        differ = [f"{k}={state[k]!r} (here {v!r})" for k, v in vars(self).items() if state[k] != v]
        if differ:
            raise ValueError(f"the position is one in other passes: {', '.join(differ)}")
        epoch, step = state["epoch"], state["step"]
        if type(epoch) is not int or type(step) is not int or epoch < 0 or not 0 <= step < max(self.steps, 1):
            raise ValueError(f"there is no step {step!r} of pass {epoch!r}: a pass has {self.steps} steps")
        if epochs is not None and (epoch, step) > (epochs, 0):
            raise ValueError(f"the position is in pass {epoch}, and there are {epochs}")
        return epoch, step
