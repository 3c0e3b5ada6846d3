"""Which region of which rank goes where: a pure function of two layouts."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple

from raycrew.tensor_transport.weights.resharding._layouts import Layout, Region, TensorLayout, itemsize_of
from raycrew.tensor_transport.weights.resharding._planning.agreement import (
    check_agreement,
    check_names,
    check_targets,
)
from raycrew.tensor_transport.weights.resharding._planning.needs import (
    Copy,
    Template,
    copies_of,
    find_needs,
    join_copies,
)

_Nodes = Mapping[int, str]


class Move(NamedTuple):
    """A region of one rank's parameter that goes to a region of another's; both have the same shape.

    Attributes:
        tensor: Name of the tensor; of the first one, where neighbours are moved as one.
        source_rank: Rank among the sources.
        source_parameter: Name of the parameter there.
        source: Where it lies in that parameter's memory.
        dtype: Of the source.
        target_rank: Rank among the targets.
        target_parameter: Name of the parameter there.
        target: Where it goes in that parameter's memory.
        target_dtype: Another one than `dtype` where a cast was named.
    """

    tensor: str
    source_rank: int
    source_parameter: str
    source: Region
    dtype: str
    target_rank: int
    target_parameter: str
    target: Region
    target_dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes that move."""
        return self.source.size * itemsize_of(self.dtype)


class _Entry(NamedTuple):
    """A tensor's copies by target rank; `shared` where neighbours may be those of another tensor."""

    name: str
    source: TensorLayout
    target: TensorLayout
    copies: dict[int, tuple[Copy, ...]]
    shared: bool


_Matched = tuple[str, TensorLayout, TensorLayout, Template]
_Shared = dict[tuple[int, str, str, str], list[tuple[int, int, Copy, _Entry]]]
"""(source's rank, its parameter, target's, dtype) -> copies by their offset in the target and number."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Moves that fill each target's parameters, every element once.

    Attributes:
        source: The layout that is read.
        target: The layout that is filled.
        bytes_from: Source rank -> bytes that it gives.
        size_bytes: Bytes that all targets together get.
    """

    source: Layout
    target: Layout
    bytes_from: Mapping[int, int]
    size_bytes: int
    _entries: tuple[_Entry, ...]

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """What one target gets, ordered by source rank."""
        moves: list[Move] = []
        shared: _Shared = {}
        for i, entry in enumerate(self._entries):
            sources, targets = entry.source.parameters, entry.target.parameters
            for copy in entry.copies.get(rank, ()):
                source = sources[copy.source_parameter] if sources else entry.name
                target = targets[copy.target_parameter] if targets else entry.name
                if entry.shared:
                    found = shared.setdefault((copy.source_rank, source, target, entry.source.dtype), [])
                    found.append((copy.target.offset, i, copy, entry))
                else:
                    moves.append(_move(copy, source, target, entry))
        moves += _merged(shared)
        return tuple(sorted(moves, key=attrgetter("source_rank")))

    def moves(self) -> Iterator[Move]:
        """All moves, target by target."""
        for rank in self.target_ranks:
            yield from self.moves_to(rank)

    def parameters_from(self, rank: int) -> frozenset[str]:
        """The parameters of one source that anybody takes something of."""
        return frozenset(
            entry.source.parameters[copy.source_parameter] if entry.source.parameters else entry.name
            for entry in self._entries
            for copies in entry.copies.values()
            for copy in copies
            if copy.source_rank == rank
        )

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The targets that get anything."""
        return tuple(sorted({rank for entry in self._entries for rank in entry.copies}))

    def __repr__(self) -> str:
        return f"ReshardPlan({len(self._entries)} tensors, {self.size_bytes} bytes)"


def plan_reshard(
    source: Layout,
    target: Layout,
    *,
    casts: Mapping[str, str] | None = None,
    unused: Literal["error", "ignore"] = "error",
    source_nodes: _Nodes | None = None,
    target_nodes: _Nodes | None = None,
) -> ReshardPlan:
    """Which region of which source rank goes where, so that each target element is filled once.

    Where several ranks hold the same, those on the target's node are taken if there are any, and of these
    the one that has least to give so far. A plan is a function of the arguments alone: all ranks may make it
    by themselves. The last ones are kept by the layouts' digests.

    Args:
        source: Who holds what. Names are those of the tensors: `Layout.rename` has them agree.
        target: Who is to hold what.
        casts: Pattern of names (`fnmatch`) -> dtype of the target, where it differs from the source's; of
            several patterns that a name matches one has to tell it.
        unused: "error" where a tensor that no target wants is one, "ignore" to leave such out.
        source_nodes: Source rank -> its node.
        target_nodes: Target rank -> its node.

    Raises:
        ValueError: `unused` is something else.
        ReshardError: A name, shape or dtype differs; nobody holds a region; two regions go to one place, or a
            part of a parameter gets nothing. The error names tensor and region.
    """
    if unused not in ("error", "ignore"):
        raise ValueError(f"unused is 'error' or 'ignore', not {unused!r}")
    nodes = tuple(tuple(sorted((found or {}).items())) for found in (source_nodes, target_nodes))
    return _cached(source, target, tuple(sorted((casts or {}).items())), unused, *nodes)


@lru_cache(16)
def _cached(
    source: Layout,
    target: Layout,
    casts: tuple[tuple[str, str], ...],
    unused: str,
    source_nodes: tuple[tuple[int, str], ...],
    target_nodes: tuple[tuple[int, str], ...],
) -> ReshardPlan:
    check_names(source, target, unused)
    check_targets(target)
    templates: dict[tuple[int, int], Template] = {}
    found: list[_Matched] = []
    for name, wanted in sorted(target.tensors.items()):  # As digests do: the order of naming does not count.
        held = source.tensors[name]
        if held.shape != wanted.shape or held.dtype != wanted.dtype:
            check_agreement(name, held, wanted, casts)
        key = (id(held.shares), id(wanted.shares))
        if (template := templates.get(key)) is None:
            template = templates[key] = find_needs(name, held.shares, wanted.shares)
        found.append((name, held, wanted, template))
    return _assign(source, target, found, dict(source_nodes), dict(target_nodes))


def _assign(
    source: Layout,
    target: Layout,
    found: list[_Matched],
    source_nodes: dict[int, str],
    target_nodes: dict[int, str],
) -> ReshardPlan:
    """Choose among the sources of each need, and write the copies out."""
    load = _fixed_load(found)
    chosen = _choose(found, load, source_nodes, target_nodes)
    copies: dict[tuple[int, tuple[int, ...]], dict[int, tuple[Copy, ...]]] = {}
    together = _shared(source), _shared(target)
    entries = []
    for i, (name, held, wanted, template) in enumerate(found):
        key = (id(template), tuple(chosen[i, j] for j in template.free) if template.free else ())
        if key not in copies:
            copies[key] = copies_of(template, key[1])
        both = not together[0].isdisjoint(held.parameters) and not together[1].isdisjoint(wanted.parameters)
        entries.append(_Entry(name, held, wanted, copies[key], both))
    return ReshardPlan(source, target, dict(load), sum(load.values()), tuple(entries))


def _fixed_load(found: list[_Matched]) -> Counter[int]:
    """Source rank -> bytes that nobody else could give."""
    counts = Counter((id(template), held.dtype) for _, held, _, template in found)
    templates = {id(template): template for *_, template in found}
    load: Counter[int] = Counter()
    for (key, dtype), count in counts.items():
        for rank, size in templates[key].fixed.items():
            load[rank] += size * itemsize_of(dtype) * count
    return load


def _choose(
    found: list[_Matched], load: Counter[int], source_nodes: _Nodes, target_nodes: _Nodes
) -> dict[tuple[int, int], int]:
    """(tensor, need) -> which of its sources gives it: the largest first, from whom has least to give."""
    free = [
        (-template.needs[j].box.size * itemsize_of(held.dtype), i, j)
        for i, (_, held, _, template) in enumerate(found)
        for j in template.free
    ]
    chosen: dict[tuple[int, int], int] = {}
    for size, i, j in sorted(free):
        need = found[i][3].needs[j]
        ranks = [held.rank for held in need.sources]
        node = target_nodes.get(need.target.rank)
        near = [k for k, rank in enumerate(ranks) if node is not None and source_nodes.get(rank) == node]
        chosen[i, j] = pick = min(near or range(len(ranks)), key=lambda k, r=ranks: (load[r[k]], r[k], k))
        load[ranks[pick]] -= size
    return chosen


def _move(copy: Copy, source: str, target: str, entry: _Entry) -> Move:
    return Move(
        entry.name,
        copy.source_rank,
        source,
        copy.source,
        entry.source.dtype,
        copy.target_rank,
        target,
        copy.target,
        entry.target.dtype,
    )


def _merged(shared: _Shared) -> Iterator[Move]:
    """Moves between parameters of several tensors, neighbours as one."""
    for (_, source, target, _), copies in shared.items():
        stack: list[tuple[Copy, _Entry]] = []
        for _, _, copy, entry in sorted(copies, key=itemgetter(0, 1)):
            grown, first = copy, entry
            while stack and (joined := join_copies(stack[-1][0], grown)):
                grown, first = joined, stack.pop()[1]
            stack.append((grown, first))
        for copy, entry in stack:
            yield _move(copy, source, target, entry)


def _shared(layout: Layout) -> set[str]:
    """The parameters that hold parts of several tensors."""
    counts = Counter(name for t in layout.tensors.values() for name in t.parameters)
    return {name for name, count in counts.items() if count > 1}
