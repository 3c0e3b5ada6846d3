"""Which of a group's spare bundles the workers come to that replace others; pure."""

from collections.abc import Collection, Mapping, Sequence

from raycrew.worker_groups._start import Layout, Place


def choose(
    layout: Layout, positions: Sequence[int], lost: Collection[int], places: Mapping[Place, bool]
) -> dict[int, Place]:
    """The bundle that each of some positions moves to.

    Those that have lost theirs come first, and take whatever there is; others move only to where somebody
    stands by. Of bundles that are alike, one on the same node is taken.

    Args:
        layout: The group.
        positions: Whose workers are replaced.
        lost: Those of them whose bundles are gone.
        places: Spare bundles, and whether somebody stands by there.

    Returns:
        By position, its new bundle; those that stay, or find none, are left out.
    """
    bundles, free, found = layout.claim.bundles, list(places), dict[int, Place]()
    for position in sorted(positions, key=lambda each: each not in lost):
        bundle = bundles[position]
        able = [p for p in free if p.has_room_for(bundle) and (places[p] or position in lost)]
        if able:
            efforts = [(not places[place], place.bundle.node_id != bundle.node_id) for place in able]
            found[position] = able[efforts.index(min(efforts))]
            free.remove(found[position])
    return found


def templates(layout: Layout, places: Sequence[Place]) -> dict[int, Place]:
    """Spare bundles, each under a position whose worker could move there, on the same node if possible.

    Bundles that no further position could move to are left out.
    """
    bundles, found = layout.claim.bundles, dict[int, Place]()
    for place in places:
        able = (p for p, bundle in enumerate(bundles) if place.has_room_for(bundle))
        left = [position for position in able if position not in found]
        if left:
            found[min(left, key=lambda p: bundles[p].node_id != place.bundle.node_id)] = place
    return found
