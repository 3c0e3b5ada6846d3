"""What is wanted of workers for a diagnosis, and what is found of each; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from raycrew.worker_groups._health.reports import Seen


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of each worker is wanted besides how it is.

    Attributes:
        lines: How many of each file of its output; None for none.
        stacks: Whether its stacks are.
        records: Whether what the recorder of its collectives wrote is.
    """

    lines: int | None = None
    stacks: bool = False
    records: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """What is found of one worker; `missing` says by part why it is not there, or not whole.

    Attributes:
        seen: How it is.
        stacks: Where its threads are.
        told_by: What told the stacks.
        output: The last lines of its output.
        record: What the recorder of its collectives wrote.
        record_path: Where that lies on the worker's node.
        missing: Why what is not there is not: "state", "stacks", "output", "record".
    """

    seen: Seen | None = None
    stacks: str = ""
    told_by: str = ""
    output: str = ""
    record: bytes = field(default=b"", repr=False)
    record_path: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether it lives and could answer at once, as far as is seen."""
        return self.seen is not None and self.seen.is_alive and self.seen.is_idle

    def of_dead(self) -> Self:
        """The same of a worker that is known to have died meanwhile."""
        return self if self.seen is None else replace(self, seen=replace(self.seen, is_alive=False))

    @classmethod
    def nothing(cls, why: str) -> Self:
        """Of a worker that could not be asked after."""
        return cls(missing={"state": why})

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """What a watch's answer says."""
        told = answer["seen"]
        seen = None if isinstance(told, str) else Seen.of(told)
        stacks, told_by = answer.get("stacks", ("", ""))
        output, no_output = answer.get("output", ("", ""))
        path, record, no_record = answer.get("record", ("", b"", ""))
        why = {
            "state": told if isinstance(told, str) else "",
            "stacks": "" if told_by else stacks,
            "output": no_output,
            "record": no_record,
        }
        return cls(
            seen,
            stacks if told_by else "",
            told_by,
            output,
            record,
            path,
            {part: reason for part, reason in why.items() if reason},
        )
