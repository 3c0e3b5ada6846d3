"""How far generation may run ahead of training, so that no sample is too old when it is learnt from. Pure."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Admission:
    """Hands out leave to generate.

    Round k learns with version k of the weights. Of all prompts that were ever asked for, those that were not
    dropped are learnt from in about the order in which they were asked for; while generators have version v,
    no more are admitted than fit into the rounds up to v + bound.

    Attributes:
        bound: How many versions old a sample may be.
        per_round: Prompts in a round.
        rounds: How many rounds there are: nothing is made that nobody will learn from.
        dropped: How many prompts were dropped since, as their samples were too old.
        version: Of the weights that the generators have; the first is 1.
        asked: Prompts that were admitted so far.
    """

    bound: int
    per_round: int
    rounds: int
    dropped: Callable[[], int]
    version: int = 1
    asked: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def room(self) -> int:
        """How many prompts may be admitted now."""
        last = min(self.version + self.bound, self.rounds)
        return last * self.per_round - (self.asked - self.dropped())

    async def admit(self, most: int) -> int:
        """Wait until there is room, and take it; for how many prompts."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.room > 0)
            n = min(most, self.room)
            self.asked += n
            return n

    async def note(self, version: int | None = None) -> None:
        """Generators have this version now, or samples may have been dropped: there may be room."""
        async with self._changed:
            self.version = version or self.version
            self._changed.notify_all()
