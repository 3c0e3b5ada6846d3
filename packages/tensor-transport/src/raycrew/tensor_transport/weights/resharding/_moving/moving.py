"""Plans carried out: sources offer their shards, and each target pulls what it needs into its parameters."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from raycrew.tensor_transport._bytes import arrange, copy_elements, count_write, tensor_bytes
from raycrew.tensor_transport.errors import DamagedBytesError, ReshardError
from raycrew.tensor_transport.transports import Offer, PullTransport
from raycrew.tensor_transport.weights._update import overlaps_of
from raycrew.tensor_transport.weights.resharding._layouts import local_tensor
from raycrew.tensor_transport.weights.resharding._moving.filling import Filler, Source
from raycrew.tensor_transport.weights.resharding._moving.memories import (
    Slot,
    fold_region,
    memories_of,
    tied,
    view,
)
from raycrew.tensor_transport.weights.resharding._planning import Move, ReshardPlan


@dataclass(frozen=True, slots=True)
class ShardOffers:
    """What one source rank has ready for the targets of a plan; small and picklable.

    Attributes:
        rank: The source.
        layouts: Digests of the plan's two layouts.
        offers: To be withdrawn by whoever made them, once no target needs them any more.
        slots: Parameter -> where its memory begins in the offers.
        folds: (target rank, number of the move) -> fold of what moves; None without checksums.
        version: Which state of the model the shards are; None where nobody said.
    """

    rank: int
    layouts: tuple[str, str]
    offers: tuple[Offer, ...] = field(repr=False)
    slots: Mapping[str, Slot] = field(repr=False)
    folds: Mapping[tuple[int, int], int] | None = field(default=None, repr=False)
    version: int | None = None


@dataclass(frozen=True, slots=True)
class ReshardReceipt:
    """What one target got.

    Attributes:
        rank: The target.
        size_bytes: Bytes that moved.
        moves: How many moves those were.
        seconds: How long it took.
    """

    rank: int
    size_bytes: int
    moves: int
    seconds: float


def offer_shards(
    state: Mapping[str, torch.Tensor],
    plan: ReshardPlan,
    rank: int,
    transport: PullTransport,
    *,
    checksums: bool = False,
    version: int | None = None,
) -> ShardOffers:
    """Have this rank's parameters ready for the targets of a plan: those that some target takes a part of.

    Large parameters are offered from the memory they have, small ones together from a copy. Unless the
    transport keeps copies (`capabilities.keeps_copy`), nobody may write to them until they are withdrawn by
    `transport.withdraw(offers.offers)`.

    Args:
        state: This rank's tensors and DTensors by name of the parameter.
        plan: The same on all ranks.
        rank: This rank among the sources.
        transport: How the targets pull.
        checksums: Take a fold of each move, for the targets to compare.
        version: Which state of the model this is, the training step for example: targets take shards of one
            version only.

    Raises:
        ReshardError: The parameters are not those of the plan's layout.
        TransportError: There is no room, or the transport is not available here.
    """
    memories = memories_of(state, plan.source, rank, plan.parameters_from(rank))
    held = [name for name, memory in memories.items() if memory.numel()]
    slots, buffers = arrange([tensor_bytes(memories[name], name) for name in held])
    folds = _folds(memories, plan, rank) if checksums else None
    offers: list[Offer] = []
    try:
        offers.extend(transport.offer(buffer) for buffer in buffers)
    except BaseException:
        transport.withdraw(offers)
        raise
    places = {name: Slot(slot.buffer, slot.offset) for name, slot in zip(held, slots, strict=True)}
    return ShardOffers(rank, (plan.source.digest, plan.target.digest), tuple(offers), places, folds, version)


def pull_shards(
    state: Mapping[str, torch.Tensor],
    plan: ReshardPlan,
    rank: int,
    offers: Iterable[ShardOffers],
    transport: PullTransport,
    *,
    bucket_bytes: int = 16 << 20,
    timeout_s: float | None = None,
    version: int | None = None,
) -> ReshardReceipt:
    """Fill this rank's parameters from the sources' shards, each byte once, in place.

    Regions that are contiguous on both sides arrive in the parameters themselves; others go through two
    buffers of `bucket_bytes`, one of which is filled while the other one is taken apart. Where the transport
    maps, they are copied out of the sources' memory in one go. If this fails, the parameters hold anything.

    Of parameters that are one tensor here, or have some memory in common as `w` and `w[:4]` have, all are
    pulled, and compared: those beside the first one take memory of their own meanwhile
    (`layout_of(skip_tied=True)` asks for the first of those that are one tensor alone).

    Args:
        state: This rank's tensors and DTensors by name of the parameter.
        plan: The same on all ranks.
        rank: This rank among the targets.
        offers: What `offer_shards` gave on each source.
        transport: How to pull.
        bucket_bytes: Size of each of the two buffers.
        timeout_s: Deadline for all of it.
        version: What the offers have to be of; whichever it is unless given, but one.

    Raises:
        ReshardError: Before a byte moves: the parameters are not those of the plan's layout, offers are those
            of another plan or version, or a source is missing. Afterwards: parameters that have memory
            in common here differ at the sources.
        DamagedBytesError: A fold differs; the message names tensor and source.
        TransportTimeoutError: The deadline passed.
        ShardLostError: A source died or cannot be reached.
        StaleHandleError: Offers were withdrawn.
    """
    if bucket_bytes < 1 << 10:
        raise ValueError(f"bucket_bytes must be at least 1024, got {bucket_bytes}")
    start = time.perf_counter()
    memories = memories_of(state, plan.target, rank)
    moves = plan.moves_to(rank)
    sources = _sources(moves, plan, offers)
    _check_versions(sources, version)
    twins = tied(state, memories)
    overlaps = overlaps_of({name: local_tensor(name, state[name]) for name in memories})
    beside = [*twins, *(name for overlap in overlaps for name in list(overlap)[1:])]
    filled = memories | {name: torch.empty_like(memories[name]) for name in beside}
    filler = Filler(filled, transport, bucket_bytes, timeout_s)
    try:
        filler.fill((_place(sources[move.source_rank], move), move) for move in _rotated(moves, rank))
    finally:
        written = {move.target_parameter for move in moves}
        count_write(each[name] for name in written for each in (memories, state))  # DTensors for themselves
    _compare(filled, moves, rank, sources)
    _compare_tied(filled, moves, rank, twins)
    for overlap in overlaps:
        _lay_together(memories, filled, [m for m in moves if m.target_parameter in overlap], rank)
    size = sum(move.size_bytes for move in moves)
    return ReshardReceipt(rank, size, len(moves), time.perf_counter() - start)


def _folds(memories: Mapping[str, torch.Tensor], plan: ReshardPlan, rank: int) -> dict[tuple[int, int], int]:
    found = {}
    for target in plan.target_ranks:
        for i, move in enumerate(plan.moves_to(target)):
            if move.source_rank == rank:
                _refuse_cast(move)
                found[target, i] = fold_region(memories[move.source_parameter], move.source)
    return found


def _refuse_cast(move: Move) -> None:
    if move.dtype != move.target_dtype:
        raise ValueError(
            f"checksums compare values that arrive as they were sent; {move.tensor!r} is cast from "
            f"{move.dtype} to {move.target_dtype}"
        )


def _sources(
    moves: Sequence[Move], plan: ReshardPlan, offers: Iterable[ShardOffers]
) -> dict[int, ShardOffers]:
    """The offers by source rank, checked."""
    found: dict[int, ShardOffers] = {}
    layouts = (plan.source.digest, plan.target.digest)
    for each in offers:
        if each.layouts != layouts:
            raise ReshardError(
                f"source rank {each.rank} offers its shards for other layouts ({each.layouts[0]} to "
                f"{each.layouts[1]}) than this target's ({layouts[0]} to {layouts[1]}): plan from the same "
                "layouts on all ranks"
            )
        if each.rank in found:
            raise ReshardError(f"source rank {each.rank} offers its shards twice")
        found[each.rank] = each
    for move in moves:
        if move.source_rank not in found or move.source_parameter not in found[move.source_rank].slots:
            raise ReshardError(
                f"source rank {move.source_rank} offers no {move.source_parameter!r}, of which "
                f"{move.tensor!r} is to be filled",
                tensor=move.tensor,
            )
    return found


def _check_versions(sources: Mapping[int, ShardOffers], wanted: int | None) -> None:
    found = {rank: offers.version for rank, offers in sorted(sources.items())}
    versions = set(found.values()) | ({wanted} if wanted is not None else set())
    if len(versions) > 1:
        expected = "one version" if wanted is None else f"version {wanted}"
        raise ReshardError(
            f"the shards have to be of {expected}; the source ranks offer the versions {found}: nothing was "
            "moved. Withdraw old offers, and offer again on all ranks"
        )


def _place(offers: ShardOffers, move: Move) -> Source:
    slot = offers.slots[move.source_parameter]
    return Source(offers.offers[slot.offer], slot.offset)


def _rotated(moves: Sequence[Move], rank: int) -> Iterator[Move]:
    """The moves by source, each target beginning with another one."""
    groups = [list(found) for _, found in groupby(moves, key=lambda move: move.source_rank)]
    first = rank % len(groups) if groups else 0
    for group in groups[first:] + groups[:first]:
        yield from group


def _compare(
    memories: Mapping[str, torch.Tensor], moves: Sequence[Move], rank: int, sources: Mapping[int, ShardOffers]
) -> None:
    for i, move in enumerate(moves):
        source = sources[move.source_rank]
        if source.folds is None:
            continue
        if source.folds.get((rank, i)) != fold_region(memories[move.target_parameter], move.target):
            owner = source.offers[source.slots[move.source_parameter].offer].owner
            raise DamagedBytesError(
                f"{move.tensor!r} from source rank {move.source_rank} ({owner}) arrived damaged, or was "
                "written to meanwhile: its fold differs",
                owner=str(owner),
            )


def _compare_tied(
    filled: Mapping[str, torch.Tensor], moves: Sequence[Move], rank: int, twins: Mapping[str, str]
) -> None:
    """What was pulled for a name that is another one's tensor here, with what that one has now."""
    for move in moves:
        name = move.target_parameter
        first = twins.get(name)
        if first is not None and fold_region(filled[name], move.target) != fold_region(
            filled[first], move.target
        ):
            raise ReshardError(
                f"{first!r} and {name!r} are one tensor on rank {rank}, and differ at the sources "
                f"({move.tensor!r} from source rank {move.source_rank}): tie them there, too, or not here",
                tensor=move.tensor,
            )


def _lay_together(
    memories: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor], moves: Sequence[Move], rank: int
) -> None:
    """Write what was pulled for names that have memory in common, and look whether all of it is there."""
    folds = [fold_region(filled[move.target_parameter], move.target) for move in moves]
    for name, region in ((move.target_parameter, move.target) for move in moves):
        if filled[name] is not memories[name]:
            copy_elements(view(memories[name], region), view(filled[name], region))
    for move, expected in zip(moves, folds, strict=True):
        if fold_region(memories[move.target_parameter], move.target) != expected:
            names = ", ".join(map(repr, sorted({each.target_parameter for each in moves})[:5]))
            raise ReshardError(
                f"{names} have memory in common on rank {rank}, and differ at the sources ({move.tensor!r} "
                f"from source rank {move.source_rank}): tie them there, too, or not here",
                tensor=move.tensor,
            )
