"""A round: one fault against what stands, and what is known of it by the end."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chaos.accounting import Book
from chaos.faults import Fault
from chaos.standing import Standing
from chaos.strike import Strike, striking

Disturb = Callable[[int], object]
SPARE_S = 0.5


@dataclass
class Round:
    """What is known of a round.

    Attributes:
        began: When the fault happened, on the monotonic clock.
        by_design: Results that were lost as the driver that owned them was killed.
        missed: Why the fault happened to nobody; empty if it did happen.
        notes: What else there is to say.
    """

    fault: Fault
    stands: Standing
    book: Book = field(init=False)
    began: float = field(default_factory=time.monotonic)
    by_design: int = 0
    missed: str = ""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = Book(self.fault.may_fail)

    @property
    def item(self) -> str:
        """The id of the round's only item, where it has one."""
        return str(self.fault.number)

    @property
    def slow_s(self) -> float:
        """How long a start or an end has to take so that the fault happens in the midst of it."""
        return self.fault.delay_s + SPARE_S

    @contextlib.contextmanager
    def striking(self, act: Callable[[], object], delay_s: float | None = None) -> Iterator[Strike]:
        """Let the fault happen during a block; after its own delay unless another one is given."""
        try:
            with striking(self.fault.delay_s if delay_s is None else delay_s, act) as strike:
                yield strike
        finally:
            self.began, self.missed = strike.began, strike.missed
