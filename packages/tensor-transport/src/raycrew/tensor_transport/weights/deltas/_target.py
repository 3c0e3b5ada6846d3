"""The receiver's end of deltas: tensors into which what changed is written, whole updates or nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from raycrew.tensor_transport._bytes import (
    check_tensor,
    copy_elements,
    count_write,
    fold,
    tensor_bytes,
    tensor_over,
)
from raycrew.tensor_transport.errors import (
    BaseVersionError,
    DamagedBytesError,
    DecodeError,
    ManifestMismatchError,
)
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.weights._update import overlaps_of, twins_of
from raycrew.tensor_transport.weights.deltas._packed import NO_VERSION, Delta, kind_of


class _Version(NamedTuple):
    """Which version of which source a tensor holds."""

    source: int
    number: int


class DeltaTarget:
    """Applies what a `DeltaSource` tells to tensors in place: `WeightReceiver(target.load, deltas=target)`.

    Several ranks may tell of a model, each with a source of its own, and each tensor by one of them.

    An update is applied whole, or undone: what it overwrites is kept until it is committed, which takes as
    much memory as the changes, and one copy of the tensors during a full update that replaces another one.

    Args:
        weights: The tensors, on any device, under the names that the source uses. Nobody else may write to
            them: changes are told against what they hold.
        verify: Compare the fold of each tensor afterwards.

    Raises:
        UnsupportedTensorError: A tensor has no plain bytes.
    """

    keeps_buckets = False

    def __init__(self, weights: Mapping[str, torch.Tensor], *, verify: bool = True) -> None:
        for name, tensor in weights.items():
            check_tensor(tensor, name)
        self._weights = dict(weights)
        self._twins = twins_of(self._weights)
        self._overlaps = overlaps_of(self._weights)
        self._verify = verify
        self._held: dict[str, _Version] = {}
        self._before: dict[str, _Version] = {}
        self._undo: list[tuple[str, Delta]] = []
        self._is_written = False

    @property
    def version(self) -> int | None:
        """The source's number of the version that the tensors hold; None before the first.

        Of several sources, one of which may have begun anew, the highest.
        """
        return max((held.number for held in self._held.values()), default=None)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Apply one update.

        Raises:
            BaseVersionError: It is told against another version than is held: a full update is needed.
            ManifestMismatchError: Names, shapes or dtypes are not those of the tensors, or names that have
                memory in common here differ at the source.
            DecodeError: A delta is damaged.
            DamagedBytesError: The result of one is not what it should be.
        """
        self.committed(0, ())
        self._before = self._held
        told: dict[str, _Version] = {}
        folds: dict[str, tuple[str, int]] = {}
        sums: dict[str, int] = {}
        numbers: dict[int, int] = {}
        try:
            for key, packed in tensors:
                name = key.rpartition("@")[0]
                delta = Delta.unpacked(tensor_bytes(packed, key))
                _check_one_version(name, delta, told, numbers)
                self._check(name, delta)
                self._check_twin(name, delta, folds)
                self._apply(name, delta)
                told[name], sums[name] = _Version(delta.source, delta.version), delta.fold
            if told and (missing := sorted(self._weights.keys() - told.keys())):
                lacks = f"it lacks {', '.join(map(repr, missing[:5]))}"
                raise _mismatch(lacks, max(numbers.values()), missing)
            self._check_overlaps(sums, max(numbers.values(), default=0))
            self._held = told or self._held
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Return to the version before the update that was loaded last, unless it was committed.

        Where an interrupt came while a tensor was written, that is a mixture, and no version is held.
        """
        before, self._held = {} if self._is_written else self._before, {}
        for name, undo in reversed(self._undo):
            self._write(name, undo, verify=False)
        self._undo, self._before, self._held = [], before, before

    def is_at_hand(self, names: frozenset[str]) -> bool:  # noqa: ARG002 - as below
        """Whether what an update overwrites is kept: before the first one, nothing is."""
        return bool(self._held)

    def committed(self, version: int, fetched: Sequence[object]) -> None:  # noqa: ARG002 - a receiver's Rollback
        """There is no way back from what was loaded last."""
        self._undo, self._before, self._is_written = [], self._held, False

    def weights(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ARG002 - as above
        """Return to the version before; nothing is left to be loaded then."""
        self.revert()
        return iter(())

    def _check(self, name: str, delta: Delta) -> None:
        """Raise unless a delta is of these tensors, and against what they hold."""
        if name not in self._weights:
            raise _mismatch(f"{name!r} is unknown", delta.version, [name])
        tensor = self._weights[name]
        size = (tensor.numel() * tensor.element_size(), tensor.element_size())
        if delta.kind != kind_of(tensor) or (delta.whole_bytes, delta.itemsize) != size:
            raise _mismatch(
                f"{name!r} is {delta.kind or 'of no kind'} at the source, and {kind_of(tensor)} here",
                delta.version,
                [name],
            )
        before = self._before.get(name)
        if delta.base != NO_VERSION and before != (delta.source, delta.base):
            ours = before is not None and before.source == delta.source
            held = f"version {before.number}" if ours and before is not None else "nothing of it"
            error = BaseVersionError(
                f"update {delta.version} of a DeltaSource says what changed since its version "
                f"{delta.base}, and this receiver holds {held}: have it told in full (encode(..., full=True))"
            )
            error.bases = (delta.base,)
            raise error

    def _check_twin(self, name: str, delta: Delta, folds: dict[str, tuple[str, int]]) -> None:
        """Raise unless names that are one tensor here are told alike."""
        first = self._twins.get(name)
        if first is None:
            return
        other, value = folds.setdefault(first, (name, delta.fold))
        if value != delta.fold:
            one = f"{other!r} and {name!r} are one tensor here, and differ at the source"
            raise _mismatch(one, delta.version, [other, name])

    def _check_overlaps(self, sums: Mapping[str, int], version: int) -> None:
        """Raise unless names that have memory in common here still have what each was told, once all were."""
        for name, names in ((name, sorted(overlap)) for overlap in self._overlaps for name in overlap):
            if name in sums and fold(tensor_bytes(self._weights[name])) != sums[name]:
                some = ", ".join(map(repr, names[:5]))
                what = f"{some} have memory in common here, and differ at the source"
                raise _mismatch(what, version, names)

    def _apply(self, name: str, delta: Delta) -> None:
        self._is_written = True
        try:
            undo = self._write(name, delta, verify=self._verify)
        except (DamagedBytesError, DecodeError):
            self._is_written = False  # It is as it was.
            raise
        if self._before:
            self._undo.append((name, undo))
        self._is_written = False

    def _write(self, name: str, delta: Delta, *, verify: bool) -> Delta:
        tensor = self._weights[name].detach()
        data: Bytes = tensor_bytes(tensor, name)
        try:
            undo = delta.apply(data, verify=verify)
        finally:
            count_write([tensor])
        if not tensor.numel() or data.ctypes.data != tensor.data_ptr():
            copy_elements(tensor, tensor_over(data, tensor.dtype, tensor.shape))
        return undo


def _check_one_version(
    name: str, delta: Delta, told: Mapping[str, _Version], numbers: dict[int, int]
) -> None:
    """Raise unless a delta is of the version that its source tells, and the only one of its name."""
    if (number := numbers.setdefault(delta.source, delta.version)) != delta.version:
        raise DecodeError(
            f"the deltas of one update are those of one version of each source, not of {number} and "
            f"{delta.version}"
        )
    if name in told:
        raise DecodeError(f"{name!r} comes twice in update {delta.version}")


def _mismatch(what: str, version: int, names: Sequence[str]) -> ManifestMismatchError:
    error = ManifestMismatchError(f"update {version} does not fit the tensors: {what}", version=version)
    error.mismatched = tuple(names)
    return error
