"""Requests passed on to one of several servers, with the truth about those that can't be."""

from raycrew.worker_groups.services._forwarding.choosing import Choosing
from raycrew.worker_groups.services._forwarding.forwarder import Forwarder, Limits
from raycrew.worker_groups.services._forwarding.keys import Key

__all__ = ["Choosing", "Forwarder", "Key", "Limits"]
