"""Worker groups on Ray."""

from raycrew.worker_groups.fan_out import (
    FanOutError,
    FunctionLoadError,
    ItemCrashedError,
    ItemError,
    ItemOutcome,
    ItemTimeoutError,
    close_fan_out,
    fan_out,
    fan_out_as_completed,
)

__all__ = [
    "FanOutError",
    "FunctionLoadError",
    "ItemCrashedError",
    "ItemError",
    "ItemOutcome",
    "ItemTimeoutError",
    "close_fan_out",
    "fan_out",
    "fan_out_as_completed",
]
