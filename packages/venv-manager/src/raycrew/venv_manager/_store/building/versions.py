"""Versions, which several texts may mean."""

from packaging.version import InvalidVersion, Version


def is_version(text: str) -> bool:
    """Whether a text is a version by the standard (PEP 440)."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def same_version(one: str | None, other: str | None) -> bool:
    """Whether two texts mean the same version, as `1.0` and `1.0.0` do; others only if equal."""
    if one is None or other is None or not (is_version(one) and is_version(other)):
        return one == other
    return Version(one) == Version(other)
