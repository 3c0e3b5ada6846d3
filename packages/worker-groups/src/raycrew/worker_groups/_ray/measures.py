"""Ray's own metrics, imported only by who has some: they go to the Prometheus endpoint of this node."""

from collections.abc import Sequence
from typing import Any


def counter(name: str, description: str, labels: tuple[str, ...]) -> Any:
    """A number that only grows: `inc(value, labels)`."""
    from ray.util.metrics import Counter

    return Counter(name, description, labels)


def gauge(name: str, description: str, labels: tuple[str, ...]) -> Any:
    """A number that changes: `set(value, labels)`."""
    from ray.util.metrics import Gauge

    return Gauge(name, description, labels)


def histogram(name: str, description: str, labels: tuple[str, ...], bounds: Sequence[float]) -> Any:
    """How many values there were below each bound: `observe(value, labels)`."""
    from ray.util.metrics import Histogram

    return Histogram(name, description, list(bounds), labels)
