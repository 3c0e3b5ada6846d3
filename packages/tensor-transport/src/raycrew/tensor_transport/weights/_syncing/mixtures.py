"""What is known of a group of generators from one update to the next, which may fail or begin early."""

import weakref

from raycrew.tensor_transport.protocols import PeerGroup
from raycrew.tensor_transport.weights._syncing.turns import Turns

_mixed: "weakref.WeakKeyDictionary[PeerGroup, set[int]]" = weakref.WeakKeyDictionary()
_pauses: "weakref.WeakKeyDictionary[PeerGroup, Turns]" = weakref.WeakKeyDictionary()


def mixed_ranks(group: PeerGroup) -> set[int]:
    """The ranks of a group whose last update left, or may have left, a mixture; to be changed in place."""
    try:
        return _mixed.setdefault(group, set())
    except TypeError:  # It has no hash, or takes no weak references: what is known ends with the update.
        return set()


def pauses_of(group: PeerGroup) -> Turns:
    """Whose turn it is to pause a group: who resumes it then does so before another one has it load."""
    turns = Turns("update pauses these generators")
    try:
        return _pauses.setdefault(group, turns)
    except TypeError:  # As above.
        return turns
