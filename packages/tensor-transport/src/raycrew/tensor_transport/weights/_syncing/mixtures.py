"""Ranks whose weights are, or may be, a mixture: known from one update to the next, which may fail early."""

import weakref

from raycrew.tensor_transport.protocols import PeerGroup

_mixed: "weakref.WeakKeyDictionary[PeerGroup, set[int]]" = weakref.WeakKeyDictionary()


def mixed_ranks(group: PeerGroup) -> set[int]:
    """The ranks of a group whose last update left, or may have left, a mixture; to be changed in place."""
    try:
        return _mixed.setdefault(group, set())
    except TypeError:  # It has no hash, or takes no weak references: what is known ends with the update.
        return set()
