"""Which region of a tensor a rank holds, and whether regions make up the whole: arithmetic, no bytes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from raycrew.tensor_transport.errors import ManifestMismatchError, UnsupportedTensorError
from raycrew.tensor_transport.weights._update.manifest import TensorEntry

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""(where it begins, its shape)."""


def shard_region(
    whole: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    split_dims: Sequence[int | None],
) -> Region | None:
    """The region of a tensor at one coordinate of a mesh; None where another coordinate publishes it.

    Args:
        whole: Shape of the tensor.
        mesh_shape: Ranks along each dimension of the mesh.
        coordinate: This rank's place in the mesh.
        split_dims: For each dimension of the mesh, which dimension of the tensor is split over it, as
            `torch.chunk` does, in this order; None where the ranks hold replicas: the first one publishes.
    """
    start, shape = [0] * len(whole), list(whole)
    if not math.prod(whole):
        return None if any(coordinate) else (tuple(start), tuple(shape))
    for size, place, dim in zip(mesh_shape, coordinate, split_dims, strict=True):
        if dim is None:
            if place:
                return None
            continue
        chunk = -(-shape[dim] // size)
        first = min(place * chunk, shape[dim])
        start[dim] += first
        shape[dim] = min(first + chunk, shape[dim]) - first
    return (tuple(start), tuple(shape)) if math.prod(shape) else None


def region_of(name: str, tensor: Any) -> Region | None:
    """The region of a DTensor that this rank publishes; None where there is none.

    Raises:
        UnsupportedTensorError: Its placements are not shards and replicas alone.
    """
    mesh: Any = tensor.device_mesh
    dims: list[int | None] = []
    for placement in tensor.placements:
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise UnsupportedTensorError(
                f"{name!r} has the placement {placement}: publish it gathered (sharded=False)", name=name
            )
        dims.append(None if placement.is_replicate() else placement.dim % max(1, tensor.ndim))
    region = shard_region(tuple(tensor.shape), tuple(mesh.shape), mesh.get_coordinate(), dims)
    held: tuple[int, ...] = tuple(tensor.to_local().shape)
    if region is not None and region[1] != held and region[1] and min(region[1]):
        raise UnsupportedTensorError(
            f"{name!r} holds a shard of shape {held}, where its placements say {region[1]}: publish it "
            "gathered (sharded=False)",
            name=name,
        )
    return region


def check_cover(entries: Iterable[TensorEntry], version: int) -> None:
    """Check that each element of each tensor comes exactly once.

    Raises:
        ManifestMismatchError: A tensor comes twice, or has gaps.
    """
    whole: set[str] = set()
    pieces: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if entry.whole:
            pieces.setdefault(entry.name, []).append(entry)
        elif entry.name in whole:
            raise ManifestMismatchError(
                f"update {version}: {entry.name!r} comes from several ranks; let one publish it (select=)"
            )
        else:
            whole.add(entry.name)
    for name, found in pieces.items():
        if name in whole:
            raise ManifestMismatchError(f"update {version}: {name!r} comes whole and in pieces")
        _check_pieces(found, version)


def _check_pieces(pieces: Sequence[TensorEntry], version: int) -> None:
    first = pieces[0]
    if any((p.whole, p.dtype) != (first.whole, first.dtype) for p in pieces):
        raise ManifestMismatchError(
            f"update {version}: the pieces of {first.name!r} differ in shape or dtype"
        )
    for i, piece in enumerate(pieces):
        for other in pieces[:i]:
            if _overlap(piece, other):
                raise ManifestMismatchError(
                    f"update {version}: pieces of {first.name!r} at {other.start} and {piece.start} overlap"
                )
    covered = sum(math.prod(piece.shape) for piece in pieces)
    if covered != math.prod(first.whole):
        raise ManifestMismatchError(
            f"update {version}: the pieces of {first.name!r} have {covered} of its "
            f"{math.prod(first.whole)} elements: every rank has to publish its part"
        )


def _overlap(left: TensorEntry, right: TensorEntry) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(left.start, left.shape, right.start, right.shape, strict=True)
    )
