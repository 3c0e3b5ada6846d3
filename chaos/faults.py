"""Which faults there are, and a plan of them: a fault is data, and a seed always gives the same plan."""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

CALLS = ("dispatch", "transfer")
LIFE = ("startup", *CALLS, "update", "resize", "takeover", "turns", "shutdown")
SERVICE = ("startup", *CALLS, "resize", "shutdown")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: How the command line and the report call it.
        moments: In the midst of what it may happen.
        share: Its part of a long run, relative to the others.
        latest_s: It begins at some time from 0 to this, in seconds after what it disturbs.
        lasts_s: It lasts for some time from the first to the second, in seconds.
        longest: How many of six last for all of that.
        may_fail: Whether even calls that may be sent again may fail of it, if the error names them.
        restarts: How often the standing group restarts for it, at most.
    """

    name: str
    moments: Sequence[str]
    share: float
    latest_s: float = 0.5
    lasts_s: tuple[float, float] = (0.0, 0.0)
    longest: int = 0
    may_fail: bool = False
    restarts: int = 1


KINDS = (
    Kind("killed worker", LIFE, 40, latest_s=1.0),
    Kind("stopped worker", LIFE, 22, lasts_s=(0.2, 3.0)),
    Kind("slow worker", (*CALLS, "update"), 8, lasts_s=(0.5, 2.0)),
    Kind("flapping worker", CALLS, 8, restarts=2),
    Kind("stolen port", ("rendezvous",), 4),
    Kind("full object store", CALLS, 4),
    Kind("stopped control service", SERVICE, 2.5, lasts_s=(1.0, 20.0), longest=5),
    Kind("killed node", CALLS, 2.5, may_fail=True),
    Kind("drained node", CALLS, 2.5),
    Kind("killed driver", ("startup", "dispatch", "shutdown"), 3, latest_s=3.0),
    Kind("full shared memory", ("put",), 3),
    Kind("full disk", ("build",), 3),
)


@dataclass(frozen=True)
class Fault:
    """One fault that is to be injected.

    Attributes:
        number: Which of its plan, from 0.
        kind: Name of its kind.
        moment: In the midst of what it happens.
        victim: A number from which the victim is chosen: `victim` modulo the number of candidates.
        delay_s: When it begins, in seconds after what it disturbs.
        lasts_s: For how long it lasts.
    """

    number: int
    kind: str
    moment: str
    victim: int
    delay_s: float
    lasts_s: float

    @property
    def may_fail(self) -> bool:
        """Whether even calls that may be sent again may fail of it."""
        return self._kind.may_fail

    @property
    def restarts(self) -> int:
        """How often the standing group restarts for it, at most."""
        return self._kind.restarts

    @property
    def _kind(self) -> Kind:
        return next(kind for kind in KINDS if kind.name == self.kind)


def planned(seed: int, count: int, only: Collection[str] = ()) -> list[Fault]:
    """The faults of a run: of each kind its share, and one at least where there is room, in random order.

    Args:
        seed: The same seed gives the same plan.
        count: How many.
        only: Names of kinds; all unless given.

    Raises:
        ValueError: There is no such kind, or there is to be no fault.
    """
    unknown = set(only) - {kind.name for kind in KINDS}
    if unknown or count < 1:
        known = ", ".join(kind.name for kind in KINDS)
        raise ValueError(f"at least one fault, of these kinds: {known}; not {count} of {sorted(unknown)}")
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not only or kind.name in only]
    drawn = [
        (kind, moment, position % 6 < kind.longest)
        for kind, quota in zip(kinds, quotas([kind.share for kind in kinds], count), strict=True)
        for position, moment in enumerate(_in_turn(kind.moments, quota, chance))
    ]
    chance.shuffle(drawn)
    return [_drawn(number, *what, chance) for number, what in enumerate(drawn)]


def quotas(shares: Sequence[float], count: int) -> list[int]:
    """Whole numbers in proportion to shares, whose sum is `count`; none is 0 if `count` suffices for that."""
    least = int(count >= len(shares))
    rest = count - least * len(shares)
    exact = [rest * share / sum(shares) for share in shares]
    found = [least + math.floor(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (math.floor(exact[i]) - exact[i], i))
    for i in by_remainder[: count - sum(found)]:
        found[i] += 1
    return found


def _in_turn(moments: Sequence[str], quota: int, chance: random.Random) -> list[str]:
    """All moments alike, from a random one on."""
    first = chance.randrange(len(moments))
    return [moments[(first + step) % len(moments)] for step in range(quota)]


def _drawn(number: int, kind: Kind, moment: str, is_longest: bool, chance: random.Random) -> Fault:
    delay_s, victim = round(chance.uniform(0, kind.latest_s), 3), chance.randrange(1 << 16)
    lasts_s = round(chance.uniform(*kind.lasts_s), 3)
    return Fault(number, kind.name, moment, victim, delay_s, kind.lasts_s[1] if is_longest else lasts_s)
