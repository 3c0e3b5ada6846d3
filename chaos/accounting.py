"""What became of each item that was sent, by its id."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Account:
    """What became of the items of one round.

    Attributes:
        sent: How many there were.
        answered: How many were answered, once and rightly.
        failed: How many were named in an error, as they may be.
        lost: Items of which nothing was heard, and those that failed though they might have been sent again.
        twice: Items that were answered twice, and those that ran twice though they may not.
        wrong: Items whose answer is another one, or that were answered and never ran.
    """

    sent: int
    answered: int
    failed: int
    lost: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing was lost, doubled or wrong."""
        return not (self.lost or self.twice or self.wrong)


@dataclass
class Book:
    """Notes what was sent and what came back.

    Attributes:
        may_fail: Whether calls that may be sent again may fail, too, if the error names them.
    """

    may_fail: bool = False
    _expected: dict[str, object] = field(default_factory=dict)
    _again: set[str] = field(default_factory=set)
    _answers: list[tuple[str, object]] = field(default_factory=list)
    _failures: dict[str, tuple[str, bool]] = field(default_factory=dict)  # and whether it may

    @property
    def sent(self) -> int:
        """How many items were sent."""
        return len(self._expected)

    @property
    def failures(self) -> int:
        """For how many items an error came."""
        return len(self._failures)

    def send(self, item: str, expected: object, *, again: bool) -> None:
        """An item is sent; `again` says whether it may run more than once.

        Raises:
            ValueError: An item of that id was sent before.
        """
        if item in self._expected:
            raise ValueError(f"{item} was sent before")
        self._expected[item] = expected
        if again:
            self._again.add(item)

    def answer(self, item: str, value: object) -> None:
        """An answer came for an item."""
        self._answers.append((item, value))

    def fail(self, item: str, error: BaseException | str, *, named: bool) -> None:
        """An error came for an item; `named` says whether it tells what failed, and where."""
        may = named and (self.may_fail or item not in self._again)
        self._failures[item] = (f"{type(error).__name__}: {error}".splitlines()[0], may)

    def account(self, runs: Mapping[str, int]) -> Account:
        """The account, given how often each item ran that may run once only."""
        answers = Counter(item for item, _ in self._answers)
        twice = {item for item, count in answers.items() if count > 1}
        twice |= {item for item in self._expected if item not in self._again and runs.get(item, 0) > 1}
        wrong = {item for item, value in self._answers if self._is_wrong(item, value, runs)}
        failed = {item for item in self._failures if item not in answers and self._failures[item][1]}
        lost = {
            item: self._why(item) for item in self._expected if item not in answers and item not in failed
        }
        answered = len(answers.keys() - wrong - twice)
        return Account(
            *(len(self._expected), answered, len(failed)),
            *(tuple(f"{item} ({why})" for item, why in lost.items()), tuple(sorted(twice))),
            tuple(sorted(wrong)),
        )

    def _is_wrong(self, item: str, value: object, runs: Mapping[str, int]) -> bool:
        if item not in self._expected or self._expected[item] != value:
            return True
        return item not in self._again and not runs.get(item)

    def _why(self, item: str) -> str:
        return self._failures.get(item, ("nothing was heard of it", False))[0]
