"""The publisher's end of deltas: one copy of its tensors, as of the version that was committed last."""

import functools
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from raycrew.tensor_transport._bytes import tensor_bytes
from raycrew.tensor_transport.errors import DamagedBytesError, TransportClosedError, TransportError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.weights.deltas._packed import Delta, encode_delta, kind_of
from raycrew.tensor_transport.weights.deltas._watching import Watch, refuse

Pairs = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_UNDOABLE = 4


@dataclass
class DeltaUpdate:
    """What a `DeltaSource` has to tell, as something to be published in place of the weights.

    Attributes:
        tensors: (name, tensor of uint8): a list of what changed, or, where all is told, one after another as
            they are asked for, so that it takes no memory.
        partial: Whether receivers need the version before: `publish(update.tensors, partial=update.partial)`.
        size_bytes: Bytes of the tensors so far.
        whole_bytes: Bytes of the weights that they stand for.
    """

    tensors: Iterable[tuple[str, torch.Tensor]]
    partial: bool
    size_bytes: int = 0
    whole_bytes: int = 0


class DeltaSource:
    """Tells what changed in some tensors since the version that was committed last.

    It keeps one copy of them on the CPU. Who publishes calls `commit()` when the receivers have an update;
    without that, the next one is told against the version before, as if this one had never been.
    """

    def __init__(self) -> None:
        self._id = secrets.randbits(63)
        self._kept: dict[str, Bytes] = {}
        self._undo: dict[str, Delta | None] = {}
        self._version: int | None = None
        self._told = 0
        self._complete = False
        self._closed = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(kept.nbytes for kept in self._kept.values())

    def encode(self, weights: Pairs, *, full: bool = False) -> DeltaUpdate:
        """The next version: what changed, bit by bit, in each tensor; all of it where that takes less.

        Args:
            weights: State dict, or (name, tensor), with the same names and shapes each time.
            full: Tell everything, for receivers that hold another version than the last one.

        Nobody may write to the tensors until those of the update are used up.

        Returns:
            What to publish. Its tensors are used up before the next call of any method.

        Raises:
            TransportClosedError: The source is closed.
            SourceChangedError: Somebody wrote to the tensors meanwhile; where all is told, the tensors of the
                update raise it, in the end, and so does what publishes them.
        """
        if self._closed:
            raise TransportClosedError("this DeltaSource is closed")
        self.abort()
        base = None if full else self._version
        self._told += 1
        update = DeltaUpdate((), base is not None)
        tensors = self._tell(weights, base, self._told, update)
        update.tensors = tensors if base is None else list(tensors)
        return update

    def commit(self) -> None:
        """The receivers have the update that was encoded last; later ones are told against it.

        Raises:
            TransportError: Nothing was encoded, or it was not used up.
        """
        if not self._complete:
            raise TransportError("there is no update to commit: encode one, and use up its tensors")
        self._version, self._undo, self._complete = self._told, {}, False

    def abort(self) -> None:
        """The receivers do not have the update that was encoded last; idempotent."""
        for name, undo in self._undo.items():
            if undo is None:
                self._kept.pop(name, None)
            else:
                undo.apply(self._kept[name], verify=False)
        self._undo, self._complete = {}, False

    def close(self) -> None:
        """Give up the copy; idempotent."""
        self._closed, self._complete = True, False
        self._kept, self._undo = {}, {}

    def _tell(
        self, weights: Pairs, base: int | None, version: int, update: DeltaUpdate
    ) -> Iterator[tuple[str, torch.Tensor]]:
        told: set[str] = set()
        watch = Watch(weights)
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            if version != self._told or self._closed:
                raise TransportError(f"update {version} of this DeltaSource was given up")
            if name in told:
                raise ValueError(f"the name {name!r} comes twice")
            told.add(name)
            delta = self._encode(name, tensor, base, version)
            watch.told(name, tensor, delta.fold)
            packed = delta.packed()
            update.size_bytes += packed.nbytes
            update.whole_bytes += delta.whole_bytes
            yield f"{name}@{version}", torch.from_numpy(packed)
        for name in self._kept.keys() - told:
            del self._kept[name]
        watch.check()
        self._complete = True

    def _encode(self, name: str, tensor: torch.Tensor, base: int | None, version: int) -> Delta:
        """The delta of one tensor; its new values are kept, and what undoes that if it is little."""
        data = tensor_bytes(tensor, name)
        kept = self._kept.get(name)
        if kept is not None and kept.nbytes != data.nbytes:
            kept = None
        encode = functools.partial(
            encode_delta,
            itemsize=tensor.element_size(),
            source=self._id,
            version=version,
            base=base or 0,
            kind=kind_of(tensor),
        )
        if kept is None or base is None:
            self._undo[name] = None  # Whoever is interrupted from here on does not know what is kept.
            kept = self._kept[name] = np.empty_like(data) if kept is None else kept
            kept[:] = data
            return encode(None, kept)  # Whoever writes meanwhile, what is told is what is kept.
        delta = encode(kept, data)
        self._undo[name] = None
        try:
            undo = delta.apply(kept)
        except DamagedBytesError:
            refuse([name])
        if delta.size_bytes <= delta.whole_bytes // _UNDOABLE:
            self._undo[name] = undo
        return delta
