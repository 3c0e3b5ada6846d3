"""The errors of this package, a tree under `TransportError`.

Every error can be pickled: the message is the one positional argument, the data are attributes with defaults.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class TransportError(Exception):
    """Base of every error that this package raises on its own account."""


class TransportTimeoutError(TransportError, TimeoutError):
    """A deadline passed while waiting for bytes."""


class TransportClosedError(TransportError):
    """A store, cache or server was used after its close, or Ray without the connection that this needs."""


class UnsupportedTensorError(TransportError, TypeError):
    """A tensor has no plain bytes that could be moved: quantised, sparse, or without data.

    Attributes:
        name: Where it was found: a key, a parameter's name or a path into the object.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class ShardError(TransportError):
    """A shard cannot be read.

    Attributes:
        shard_id: The shard.
        owner: Who holds its bytes: a store's epoch, an address or an actor.
        node_id: The node of the owner, where it is known.
    """

    def __init__(self, message: str, *, shard_id: str = "", owner: str = "", node_id: str = "") -> None:
        super().__init__(message)
        self.shard_id = shard_id
        self.owner = owner
        self.node_id = node_id


class StaleHandleError(ShardError):
    """The owner was restarted or the shard released: the bytes that the handle named are gone."""


class ShardLostError(ShardError):
    """The owner died or cannot be reached, and there is no replica."""


class TransferCancelledError(TransportError):
    """A transfer was cancelled: its buffers hold anything, and nothing is written to them any more."""


class DamagedBytesError(TransportError):
    """The fold of the bytes that arrived is not that of the bytes that were offered.

    Attributes:
        transport: Name of the transport that moved them.
        owner: The process that offered them.
    """

    def __init__(self, message: str, *, transport: str = "", owner: str = "") -> None:
        super().__init__(message)
        self.transport = transport
        self.owner = owner


class NoTransportError(TransportError):
    """No transport can be used by all members of a group, or not the one that was asked for.

    Attributes:
        reasons: Name of each transport that was considered -> why it can't be used.
    """

    def __init__(self, message: str, *, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class WeightUpdateError(TransportError):
    """An update was not committed: the receiver goes on reporting its previous version.

    Attributes:
        version: The version that failed.
        current_version: The version that the receiver goes on reporting, None before the first.
        intact: Whether the receiver's weights are still exactly those of `current_version`; False when
            loading had begun.
    """

    def __init__(
        self, message: str, *, version: int = 0, current_version: int | None = None, intact: bool = True
    ) -> None:
        super().__init__(message)
        self.version = version
        self.current_version = current_version
        self.intact = intact


class ManifestMismatchError(WeightUpdateError, ValueError):
    """The update's names, shapes or dtypes are not the receiver's; nothing was fetched.

    Attributes:
        missing: Names that the receiver needs and the update lacks.
        unexpected: Names that the receiver does not know.
        mismatched: One line for each shape or dtype that differs.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()


class StaleVersionError(WeightUpdateError):
    """The update is older than what the receiver already has."""


class StaleWeightsError(WeightUpdateError):
    """The weights are those of no version, of an older one than is required, or a mixture: synchronise first.

    Whatever the constructor of a restarted process loaded, it is of no version. `version` is the one that is
    required, 0 for any.
    """


class LoadRefusedError(WeightUpdateError):
    """A receiver's `load` raises it while it has changed nothing: what is held is intact, and stays."""


class BaseVersionError(WeightUpdateError):
    """A partial update has to be added to a version that the receiver does not hold.

    Attributes:
        bases: The versions that it can be added to.
    """

    bases: Sequence[int] = ()


class UpdateAbortedError(WeightUpdateError):
    """A version was given up for all: a publisher or a receiver failed, was silent, or was late."""


class DirectoryLostError(WeightUpdateError):
    """The directory of versions does not answer: whether the version was committed cannot be known."""


class BucketFetchError(WeightUpdateError):
    """A bucket's bytes could not be had: its publisher died or released them.

    Attributes:
        bucket: Index of the bucket in the update.
    """

    bucket: int = -1


class ChecksumMismatchError(WeightUpdateError):
    """The bytes that arrived are not the bytes that were published.

    Attributes:
        bucket: Index of the bucket in the update.
    """

    bucket: int = -1


class LayoutError(TransportError, ValueError):
    """A layout is impossible or can't be read from tensors: a box outside its tensor, parts that do not fit.

    Attributes:
        tensor: The tensor or parameter.
        region: Which part of it, as "[0:4, 2:3]"; empty where that does not matter.
    """

    def __init__(self, message: str, *, tensor: str = "", region: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
        self.region = region


class ReshardError(LayoutError):
    """Two layouts do not fit: a name, shape or dtype differs, or a region would get no value or two.

    No byte was moved. Look at both layouts' entry of the tensor that the message names.
    """


class GroupError(TransportError):
    """A process group can't be formed or used.

    Attributes:
        group: Name of the group.
        generation: Generation that this process is a member of, 0 where there is none.
        members: Names of the members that it is about: missing, lost, or of another opinion.
    """

    def __init__(
        self, message: str, *, group: str = "", generation: int = 0, members: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.group = group
        self.generation = generation
        self.members = tuple(members)


class GroupTimeoutError(GroupError, TransportTimeoutError):
    """Members did not arrive, or an operation did not end, before the deadline; `members` did not come."""


class PeerLostError(GroupError, ShardLostError):
    """Members died, or left the group, while others needed them; `members` are those known to be gone."""


class StaleGenerationError(GroupError):
    """The group has a later generation, or none any more: this process has to be invited again."""


class GroupMismatchError(GroupError, ValueError):
    """Members of a group want different things of one operation; no byte was moved.

    Attributes:
        wanted: What each member wants, by its name.
    """

    wanted: Mapping[str, str] = MappingProxyType({})


class BatchSchemaError(TransportError, ValueError):
    """A column does not fit the batch it was put into, or batches do not fit each other.

    Attributes:
        key: The column.
        expected: What the batch has: usually its number of rows.
        actual: What the column has.
    """

    def __init__(
        self, message: str, *, key: str = "", expected: object = None, actual: object = None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.expected = expected
        self.actual = actual


class DecodeError(TransportError, ValueError):
    """Bytes do not follow the format: truncated, damaged, or from another version."""


class SourceChangedError(TransportError):
    """Tensors were written to while their bytes were being taken: lent (`borrow=True`), or published.

    Attributes:
        names: Those that were published.
    """

    names: Sequence[str] = ()
