"""What a virtual cluster asks for, checked; and how much of it one node has room for."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from raycrew.cluster_core._planning.devices import shares_in
from raycrew.cluster_core._planning.ordering import NodeOrder, check_node_order
from raycrew.cluster_core._planning.topology import (
    DOMAIN_LABEL,
    RESOURCE_STEP,
    RESOURCES_WITH_DEVICES,
    NodeState,
)

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # As Ray has it, for names and values.
_SELECTOR = re.compile(rf"(!?)(?:in\(({_LABEL}(?:, ?{_LABEL})*)\)|({_LABEL}))")
_LABEL_NAME = re.compile(rf"(?:{_LABEL}/)?{_LABEL}")

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a virtual cluster asks for.

    Attributes:
        bundle_counts: Bundles of each logical node; zeros leave holes.
        bundle: Resources of each bundle, in Ray's names and units.
        strategy: How the bundles of *one* logical node lie: STRICT_PACK on one physical node, PACK on few,
            SPREAD on many, STRICT_SPREAD each on another.
        label_selector: Labels that a physical node must have, in Ray's notation: `"a"`, `"!a"`, `"in(a,b)"`,
            `"!in(a,b)"`.
        segment_size: How many consecutive logical nodes (of those with bundles) share one domain, or None.
        domain_label: Which label of a node names its domain.
        distinct_nodes: Whether every logical node has a physical node of its own; only with STRICT_PACK.
        bundles: In place of `bundle`, the resources of each bundle of each logical node, where they differ.
        node_selectors: Labels besides those of `label_selector`, one selector for each logical node.
        node_order: In which order physical nodes are taken: a rank for each, by node id, or a function of a
            `NodeState` that gives one. The lowest comes first; what has none, or None, comes last.
    """

    bundle_counts: tuple[int, ...]
    bundle: Amounts = field(default_factory=lambda: {"CPU": 1.0, "GPU": 1.0})
    strategy: str = "STRICT_PACK"
    label_selector: Mapping[str, str] = field(default_factory=dict)
    segment_size: int | None = None
    domain_label: str = DOMAIN_LABEL
    distinct_nodes: bool = False
    bundles: tuple[tuple[Amounts, ...], ...] | None = None
    node_selectors: tuple[Mapping[str, str], ...] = ()
    node_order: NodeOrder = None

    def __post_init__(self) -> None:
        check_counts(self.bundle_counts)
        check_strategy(self.strategy)
        check_node_order(self.node_order)
        if self.bundles is not None and [len(one) for one in self.bundles] != list(self.bundle_counts):
            raise ValueError(
                f"bundles has {[len(one) for one in self.bundles]} entries per node for the counts "
                f"{list(self.bundle_counts)}"
            )
        for bundle in {id(one): one for node in self.bundles or [[self.bundle]] for one in node}.values():
            _check_bundle(bundle)
        if self.distinct_nodes and self.strategy != "STRICT_PACK":
            raise ValueError(f"distinct_nodes needs STRICT_PACK, not {self.strategy}")
        if self.node_selectors and len(self.node_selectors) != len(self.bundle_counts):
            raise ValueError(
                f"there are {len(self.node_selectors)} label selectors for {len(self.bundle_counts)} nodes"
            )
        for selector in (self.label_selector, *self.node_selectors):
            _check_selector(selector)
        filled = sum(count > 0 for count in self.bundle_counts)
        if self.segment_size is not None and (self.segment_size < 1 or filled % self.segment_size):
            raise ValueError(
                f"segment_size {self.segment_size} does not divide {filled}, the nodes with bundles"
            )

    @property
    def packing(self) -> str:
        """How to pack: the strategy, or DISTINCT."""
        return "DISTINCT" if self.distinct_nodes else self.strategy

    @property
    def is_plain(self) -> bool:
        """Whether all bundles are alike, may lie on the same nodes, and are in no order of the caller's."""
        filled = [node for node, count in enumerate(self.bundle_counts) if count]
        alike = all(self.selector_of(node) == self.selector_of(filled[0]) for node in filled[1:])
        return len(self.kinds) == 1 and alike and self.node_order is None

    def bundles_of(self, node: int) -> tuple[Amounts, ...]:
        """The resources of each bundle of a logical node."""
        return (self.bundle,) * self.bundle_counts[node] if self.bundles is None else self.bundles[node]

    def selector_of(self, node: int) -> Mapping[str, str]:
        """The labels that the physical nodes of a logical node must have; its own have the last word."""
        return {**self.label_selector, **(self.node_selectors[node] if self.node_selectors else {})}

    @property
    def kinds(self) -> tuple[Amounts, ...]:
        """The bundles that differ, in the order of their first appearance."""
        if self.bundles is None:
            return (self.bundle,)
        return tuple({frozenset(one.items()): one for node in self.bundles for one in node}.values())


def check_counts(counts: Sequence[int]) -> None:
    """Refuse lists of bundle counts that mean nothing.

    Raises:
        TypeError: An entry is not an integer.
        ValueError: An entry is negative, or there is no bundle at all.
    """
    for node, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, (int, Integral)):
            raise TypeError(
                f"bundle count {count!r} of node {node} is a {type(count).__name__}, not an integer"
            )
        if count < 0:
            raise ValueError(f"bundle count {count} of node {node} is below 0")
    if not any(counts):
        raise ValueError(f"the bundle counts {list(counts)} ask for no bundle at all")


def check_strategy(strategy: str) -> None:
    """Refuse strategies that Ray does not have.

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"placement group strategy {strategy!r} is none of {', '.join(STRATEGIES)}")


def _check_bundle(bundle: Amounts) -> None:
    amounts = bundle.values()
    if not any(amount > 0 for amount in amounts) or not all(0 <= amount < math.inf for amount in amounts):
        said = "a bundle needs at least one positive amount and no negative one, and each is finite"
        raise ValueError(f"{said}; not {dict(bundle)}")
    if "" in bundle:
        raise ValueError(f"a resource has a name, unlike one of {dict(bundle)}")


def _check_selector(selector: Mapping[str, str]) -> None:
    for label, wanted in selector.items():
        if not isinstance(label, str) or not _LABEL_NAME.fullmatch(label):
            raise ValueError(f"label selector {label!r}: that is not the name of a label")
        if not isinstance(wanted, str) or not _SELECTOR.fullmatch(wanted):
            raise ValueError(
                f"label selector {label!r}: {wanted!r} is not one of 'a', '!a', 'in(a,b)', '!in(a,b)'"
            )


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that a selector in Ray's notation asks for."""
    return all(_matches(labels.get(label), wanted) for label, wanted in selector.items())


def _matches(value: str | None, wanted: str) -> bool:
    found = _SELECTOR.fullmatch(wanted)
    if found is None:
        return False
    negated, several, one = found.groups()
    values = [part.strip() for part in several.split(",")] if several else [one]
    return (value in values) != bool(negated)


def takes(node: NodeState, selector: Mapping[str, str]) -> bool:
    """Whether a node takes anything that has this selector."""
    return not node.draining and (not selector or matches(node.labels, selector))


def room_for(bundle: Amounts, resources: Amounts) -> int:
    """How many such bundles fit into so much."""
    return min(_room_for(name, need, resources.get(name, 0.0)) for name, need in bundle.items() if need > 0)


def _room_for(name: str, need: float, free: float) -> int:
    # Ray counts in ten-thousandths; half a step covers what binary fractions lose.
    if name in RESOURCES_WITH_DEVICES and need % 1:
        return shares_in(in_steps(free), max(in_steps(need), 1))
    return int((free + 5e-5) // need)


def in_steps(amount: float) -> int:
    """An amount in Ray's steps."""
    return int(amount * RESOURCE_STEP + 0.5)
