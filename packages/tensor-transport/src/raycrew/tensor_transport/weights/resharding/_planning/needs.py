"""What one tensor's movement takes: which box each target needs, and which sources could give it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from raycrew.tensor_transport.errors import ReshardError
from raycrew.tensor_transport.weights.resharding._layouts import (
    Block,
    Box,
    Region,
    Shape,
    Share,
    coalesce,
    contains,
    dot,
    intersect,
    subtract,
)


class Held(NamedTuple):
    """A block, who holds it, and in which of the tensor's parameters."""

    rank: int
    parameter: int
    block: Block


class Need(NamedTuple):
    """A box that a target wants, and the sources that have all of it."""

    box: Box
    target: Held
    sources: tuple[Held, ...]


class Copy(NamedTuple):
    """Elements of one source parameter that go to one target parameter, in as few dimensions as possible."""

    source_rank: int
    source_parameter: int
    target_rank: int
    target_parameter: int
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Template:
    """How any tensor moves whose source and target shares are these.

    Attributes:
        needs: In order of the targets.
        fixed: Source rank -> elements that nobody else could give.
        free: Indices of the needs that several sources could answer.
    """

    needs: tuple[Need, ...]
    fixed: dict[int, int]
    free: tuple[int, ...]


def find_needs(name: str, source: Sequence[Share], target: Sequence[Share]) -> Template:
    """Each box that a target wants, cut where different sources have to give it.

    Raises:
        ReshardError: No source has some region.
    """
    places: dict[Box, list[Held]] = {}
    for share in source:
        for block in share.blocks:
            if block.region.size:
                places.setdefault(block.box, []).append(Held(share.rank, share.parameter, block))
    boxes = sorted(places)
    needs = tuple(
        Need(box, wanted, tuple(held for other in boxes if contains(other, box) for held in places[other]))
        for share in target
        for block in share.blocks
        for wanted in [Held(share.rank, share.parameter, block)]
        for box in _pieces(name, share.rank, block.box, boxes)
    )
    fixed: dict[int, int] = {}
    for need in needs:
        if len(need.sources) == 1:
            rank = need.sources[0].rank
            fixed[rank] = fixed.get(rank, 0) + need.box.size
    return Template(needs, fixed, tuple(i for i, need in enumerate(needs) if len(need.sources) > 1))


def copies_of(template: Template, chosen: Sequence[int]) -> dict[int, tuple[Copy, ...]]:
    """Target rank -> the copies that fill its part, neighbours as one.

    Args:
        template: Of a tensor.
        chosen: For each need that is free, which of its sources gives it.
    """
    picked = dict(zip(template.free, chosen, strict=True))
    copies = [_copy(need, need.sources[picked.get(i, 0)]) for i, need in enumerate(template.needs)]
    copies.sort(key=lambda copy: copy[2:4] + copy[:2] + (copy.target.offset,))
    return {
        rank: tuple(merged(list(found))) for rank, found in groupby(copies, key=lambda copy: copy.target_rank)
    }


def merged(copies: Sequence[Copy]) -> Iterator[Copy]:
    """The same copies, with those as one that follow each other on both sides."""
    stack: list[Copy] = []
    for copy in copies:
        last = copy
        while stack and stack[-1][:4] == last[:4] and (joined := join_copies(stack[-1], last)):
            stack.pop()
            last = joined
        stack.append(last)
    yield from stack


def _pieces(name: str, rank: int, wanted: Box, boxes: Sequence[Box]) -> Iterator[Box]:
    """A wanted box, cut where the sources' boxes end."""
    left = [wanted] if wanted.size else []
    for other in boxes:
        if not left:
            return
        rest: list[Box] = []
        for box in left:
            if (found := intersect(box, other)) is None:
                rest.append(box)
            else:
                yield found
                rest += subtract(box, found)
        left = rest
    if left:
        raise ReshardError(
            f"nobody holds {left[0]} of {name!r}, which target rank {rank} needs; the layout of the sources "
            "has a gap: join the layouts of all ranks that hold a part",
            tensor=name,
            region=str(left[0]),
        )


def _copy(need: Need, source: Held) -> Copy:
    box, target = need.box, need.target
    shape, *strides = coalesce(box.shape, source.block.region.strides, target.block.region.strides)
    regions = [
        Region(_offset(held.block, box.start), shape, steps)
        for held, steps in zip((source, target), strides, strict=True)
    ]
    return Copy(source.rank, source.parameter, target.rank, target.parameter, regions[0], regions[1])


def _offset(block: Block, start: Shape) -> int:
    inside = [a - b for a, b in zip(start, block.start, strict=True)]
    return block.region.offset + dot(inside, block.region.strides)


def join_copies(a: Copy, b: Copy) -> Copy | None:
    """Two copies as one, if the second one continues the first one on both sides."""
    if a.source.strides != b.source.strides or a.target.strides != b.target.strides:
        return None
    shape, other = a.source.shape, b.source.shape
    if len(shape) != len(other):
        return None
    steps = (b.source.offset - a.source.offset, b.target.offset - a.target.offset)
    for d, length in enumerate(shape):
        along = (length * a.source.strides[d], length * a.target.strides[d])
        if steps == along and shape[:d] + shape[d + 1 :] == other[:d] + other[d + 1 :]:
            longer = (*shape[:d], length + other[d], *shape[d + 1 :])
            joined, source, target = coalesce(longer, a.source.strides, a.target.strides)
            return a._replace(
                source=Region(a.source.offset, joined, source), target=Region(a.target.offset, joined, target)
            )
    return None
