"""Which region of a DTensor each rank of a mesh publishes, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from raycrew.tensor_transport import ManifestMismatchError, UnsupportedTensorError
from raycrew.tensor_transport.weights._update.manifest import TensorEntry
from raycrew.tensor_transport.weights._update.regions import check_cover, region_of


def held_by(whole, mesh, coordinate, placements, local):
    """A DTensor as one rank of a mesh has it; no process group is formed."""
    place = SimpleNamespace(shape=torch.Size(mesh), get_coordinate=lambda: list(coordinate))
    return SimpleNamespace(
        device_mesh=place, placements=placements, shape=whole.shape, ndim=whole.ndim, to_local=lambda: local
    )


def part_of(whole, mesh, coordinate, placements):
    """What a rank holds, as `torch.chunk` cuts it, along one dimension of the mesh after the other."""
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


PLACEMENTS = st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(-1)])


@given(
    st.tuples(st.integers(0, 6), st.integers(1, 6)),
    st.lists(st.tuples(st.integers(1, 3), PLACEMENTS), min_size=1, max_size=3),
)
def test_what_ranks_publish_is_what_they_hold_and_all_of_it(shape, mesh):
    sizes, placements = [size for size, _ in mesh], [placement for _, placement in mesh]
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    published, regions = torch.full(shape, -1), []
    for coordinate in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)).tolist():
        local = part_of(whole, sizes, coordinate, placements)
        region = region_of("w", held_by(whole, sizes, coordinate, placements, local))
        if region is not None:
            start, extent = region
            there = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
            assert (published[there] == -1).all(), "nobody else did"
            published[there] = local if whole.numel() else -1
            regions.append(region)
    assert torch.equal(published, whole)
    assert len(regions) >= 1 and len(regions) == len(set(regions)), "one without elements, too"


@pytest.mark.hostile
def test_what_is_no_shard_is_refused_by_its_name():
    whole = torch.ones(4, 2)
    with pytest.raises(UnsupportedTensorError, match=r"'w' has the placement P.*sharded=False"):
        region_of("w", held_by(whole, [2], [0], [Partial()], whole))
    for rows in (1, 3):
        with pytest.raises(
            UnsupportedTensorError, match=rf"'w' holds a shard of shape \({rows}, 2\), where .* \(2, 2\)"
        ):
            region_of("w", held_by(whole, [2], [0], [Shard(0)], whole[:rows]))


def piece(start, shape, dtype="uint8", whole=(4,), name="w"):
    return TensorEntry(name, dtype, shape, 0, 0, 0, start, whole)


LEFT, RIGHT = piece((0,), (2,)), piece((2,), (2,))
WHOLE = TensorEntry("w", "uint8", (4,), 0, 0, 0)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([WHOLE, WHOLE], "'w' comes from several ranks"),
        ([LEFT, RIGHT, WHOLE], "'w' comes whole and in pieces"),
        ([LEFT, piece((2,), (2,), "int8")], "differ in shape or dtype"),
        ([LEFT, piece((2,), (2,), whole=(5,))], "differ in shape or dtype"),
        ([LEFT, RIGHT, LEFT], r"at \(0,\) and \(0,\) overlap"),
        ([piece((2,), (2,), "int8"), LEFT], "differ in shape or dtype"),
        ([piece((2,), (2,), whole=(3,)), LEFT], "differ in shape or dtype"),
        ([RIGHT], "have 2 of its 4 elements"),
        ([LEFT, piece((2,), (3,))], "have 5 of its 4 elements"),
        ([LEFT, piece((1,), (2,))], r"at \(0,\) and \(1,\) overlap"),
        ([piece((1,), (2,)), LEFT], r"at \(1,\) and \(0,\) overlap"),
    ],
)
def test_each_element_comes_once(entries, match):
    other = [piece((0,), (4,), name="v"), TensorEntry("u", "uint8", (4,), 0, 0, 0)]
    check_cover([RIGHT, *other, LEFT], 7)
    with pytest.raises(ManifestMismatchError, match=f"update 7: .*{match}"):
        check_cover([*other, *entries], 7)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_pieces_may_come_in_any_order_and_lie_apart(order):
    rows = [piece((2 * i, 0), (2, 3), whole=(6, 3)) for i in range(3)]
    check_cover([rows[i] for i in order], 7)
    corners = [piece((i, j), (1, 2), whole=(2, 4)) for i in (0, 1) for j in (0, 2)]
    check_cover([*[corners[i] for i in order], corners[3]], 7)
