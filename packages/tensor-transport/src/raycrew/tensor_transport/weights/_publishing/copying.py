"""Copies tensors into a bucket, and folds what was copied while it is in the processor's cache."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raycrew.tensor_transport._bytes import (
    FOLD_BYTES,
    SECTION_BYTES,
    BlockFolds,
    SectionFolds,
    Shared,
    copy_elements,
    flat_bytes,
    share_out,
)
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.weights._publishing.glimpses import fold_bytes, work_of
from raycrew.tensor_transport.weights._update import TensorEntry

STEP_BYTES = 2 * FOLD_BYTES
"""What a thread copies before it looks at the copy: with less, threads wait for one another."""


@dataclass(frozen=True, slots=True)
class Copying:
    """A tensor, and its place.

    Attributes:
        tensor: What is copied.
        entry: Its place in the bucket.
        bucket: Memory of the bucket, as uint8 of one dimension.
        copied: Called with the `fold` of the copy, if anybody wants it.
    """

    tensor: torch.Tensor
    entry: TensorEntry
    bucket: torch.Tensor
    copied: Callable[[int], object] | None

    @property
    def copy(self) -> torch.Tensor:
        """The tensor there: contiguous."""
        return self.entry.view(self.bucket)

    @property
    def is_unbroken(self) -> bool:
        """Whether its bytes are those of the copy, one after the other."""
        tensor = self.tensor
        return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())

    def copy_elements(self) -> None:
        """Copy it, whatever its strides."""
        with torch.inference_mode():  # whoever publishes may be in it, which other threads do not know
            copy_elements(self.copy, self.tensor)


class Filling:
    """Copies tensors of the CPU into a bucket, in which they lie one after another, by several threads.

    What has begun must be finished, or stopped.
    """

    def __init__(self, bucket: Bytes, tensors: Sequence[Copying], *, summed: bool) -> None:
        self._bucket, self._tensors = bucket, tensors
        self._runs = [_Run(each) for each in tensors]
        broken = [each for each, run in zip(tensors, self._runs, strict=True) if run.is_broken]
        share_out(broken, work_of(each.entry.size_bytes for each in broken), Copying.copy_elements)
        self._starts, self._stops = [run.start for run in self._runs], [run.stop for run in self._runs]
        self._sums = SectionFolds(len(bucket)) if summed else None
        self._sections = Shared(range(0, len(bucket), SECTION_BYTES), len(bucket), self._take)

    def begin(self) -> None:
        """Have helpers begin."""
        self._sections.begin()

    def copy(self) -> None:
        """Copy what is left, and wait for helpers."""
        self._sections.finish()

    def finish(self) -> int | None:
        """Tell of all copies, once they are made.

        Returns:
            The `fold_in_sections` of the bucket, if it is to be summed.
        """
        for run, each in zip(self._runs, self._tensors, strict=True):
            if each.copied is not None:
                each.copied(sum(run.folds))
        return None if self._sums is None else self._sums.value

    def stop(self) -> None:
        """Have nobody write to the bucket any more."""
        self._sections.stop()

    def _take(self, start: int) -> None:
        stop = min(start + SECTION_BYTES, len(self._bucket))
        folds = None if self._sums is None else BlockFolds(self._bucket[start:stop])
        for begin in range(start, stop, STEP_BYTES):
            end = min(begin + STEP_BYTES, stop)
            for run in self._runs[bisect_right(self._stops, begin) : bisect_left(self._starts, end)]:
                run.take(self._bucket, begin, end)
            if folds is not None:
                for block in range(begin, end, FOLD_BYTES):
                    folds.take((block - start) // FOLD_BYTES)
        if self._sums is not None and folds is not None:
            self._sums.add(start, folds.values)


class _Run:
    """The bytes of a bucket that are a tensor's, and the folds of parts of them."""

    def __init__(self, each: Copying) -> None:
        self.start, self.stop = each.entry.offset, each.entry.offset + each.entry.size_bytes
        self.folds: list[int] = []
        self._source = flat_bytes(each.tensor).numpy() if each.is_unbroken else None

    @property
    def is_broken(self) -> bool:
        """Whether its bytes are not those of the tensor, one after the other."""
        return self._source is None

    def take(self, bucket: Bytes, begin: int, end: int) -> None:
        """Copy what lies in a part of the bucket, which ends with a word unless the bucket does."""
        first, last = max(begin, self.start), min(end, self.stop)
        part = bucket[first:last]
        if self._source is not None:
            np.copyto(part, self._source[first - self.start : last - self.start])
        self.folds.append(fold_bytes(part))
