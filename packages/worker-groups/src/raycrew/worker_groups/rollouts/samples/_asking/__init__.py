"""What is asked of a queue, and what it answers: checked, with rows encoded, before it is sent."""

from raycrew.worker_groups.rollouts.samples._asking.codec import decode
from raycrew.worker_groups.rollouts.samples._asking.requests import (
    Columns,
    Handed,
    Request,
    Wanted,
    adding,
    checked_ids,
    checked_keys,
    getting,
    going_on,
    only,
    putting,
    use_of,
)

__all__ = [
    "Columns",
    "Handed",
    "Request",
    "Wanted",
    "adding",
    "checked_ids",
    "checked_keys",
    "decode",
    "getting",
    "going_on",
    "only",
    "putting",
    "use_of",
]
