"""Requests passed on to one of several servers or workers, with the truth about those that can't be."""

from raycrew.worker_groups.services._forwarding.calling import Caller
from raycrew.worker_groups.services._forwarding.choosing import Choosing
from raycrew.worker_groups.services._forwarding.forwarder import Forwarder
from raycrew.worker_groups.services._forwarding.keys import Key
from raycrew.worker_groups.services._forwarding.limits import Limits

__all__ = ["Caller", "Choosing", "Forwarder", "Key", "Limits"]
