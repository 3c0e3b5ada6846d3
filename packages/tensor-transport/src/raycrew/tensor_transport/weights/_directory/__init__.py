"""The directory of versions: what it knows and decides, how it is asked, and whom a publisher tells."""

from raycrew.tensor_transport.weights._directory.ballots import RecipientVersion
from raycrew.tensor_transport.weights._directory.directory import Until, WeightDirectory
from raycrew.tensor_transport.weights._directory.pace import Pace
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.telling import DirectoryTeller, LoneTeller, Returns, Teller
from raycrew.tensor_transport.weights._directory.versions import Announced, News, VersionStatus

__all__ = [
    "Announced",
    "DirectoryTeller",
    "LoneTeller",
    "News",
    "Pace",
    "RecipientVersion",
    "Record",
    "Returns",
    "Teller",
    "Until",
    "VersionStatus",
    "WeightDirectory",
]
