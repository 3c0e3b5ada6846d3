"""What becomes of requests that can't be answered, and what those who pass them on bear; pure."""

from dataclasses import dataclass

from raycrew.worker_groups.services._options import check_number

#: Whether a request that has no answer has run.
NOT_RUN, PERHAPS_RUN, HAS_RUN = "surely not run", "perhaps run", "has run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a forwarder bears.

    Raises:
        TypeError: One is no number.
        ValueError: One is too small.

    Attributes:
        timeout_s: Deadline of a request with its answer; None for no limit.
        patience_s: How long a request waits for a server while there is none.
        resends: How often a request that may have run is sent again, if it is idempotent.
        body_bytes: How long a request's body may be.
        held_bytes: How much of a request's body is held, so that it can be sent again; an answer that is
            no longer is held, too, until it is there as a whole.
    """

    timeout_s: float | None
    patience_s: float
    resends: int
    body_bytes: int
    held_bytes: int

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 1e-3)
        check_number("patience_s", self.patience_s, 0)
        for name in ("resends", "body_bytes", "held_bytes"):
            check_number(name, getattr(self, name), 0, whole=True)
