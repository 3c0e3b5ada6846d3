"""The arguments of a virtual cluster, checked before Ray is touched."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, Self

from raycrew.cluster_core._planning import (
    DOMAIN_LABEL,
    RESOURCE_STEP,
    BundleSpec,
    NodeOrder,
    PlacementRequest,
    check_counts,
    check_strategy,
    split_evenly,
    spread_specs,
)
from raycrew.cluster_core._ports import check_port_range

BundleSpecs = BundleSpec | Sequence[BundleSpec | Sequence[BundleSpec]] | None
LabelSelector = Mapping[str, str] | Sequence[Mapping[str, str] | None] | None
GpuIds = Literal["auto"] | Sequence[int] | Sequence[Sequence[int]] | None

COMMUNICATION_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "hccl")
RETRIES_VARIABLE = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
_NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The arguments of `RayVirtualCluster`, where their defaults are: checked, and what follows from them.

    Attributes:
        request: What is to be placed where.
        alias: Readable start of all names.
        slots: Worker groups that can share a bundle.
        devices: Physical devices per logical node, "auto", or None.
        retries: How often placement groups are created anew.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is out of its bounds, or contradicts another one.
    """

    bundle_ct_per_node_list: Sequence[int]
    use_gpus: bool
    max_colocated_worker_groups: int
    num_gpus_per_node: int | None
    name: str
    placement_group_strategy: str
    accelerator: str
    gpu_ids: GpuIds
    enable_colocation: bool
    monitor_memory: bool
    communication_backend: str
    cpus_per_bundle: float | None
    unified: bool
    segment_size: int | None
    label_selector: LabelSelector
    topology_strategy: Mapping[str, str] | None
    timeout_s: float
    max_retries: int | None
    port_range: tuple[int, int] | None
    bundle_specs: BundleSpecs
    node_order: NodeOrder
    request: PlacementRequest = field(init=False)
    alias: str = field(init=False)
    slots: int = field(init=False)
    devices: Literal["auto"] | tuple[tuple[int, ...], ...] | None = field(init=False)
    retries: int = field(init=False)

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among a constructor's arguments."""
        return cls(**{one.name: arguments[one.name] for one in fields(cls) if one.init})

    def __post_init__(self) -> None:
        counts = _counts(self.bundle_ct_per_node_list)
        strategy = _strategy(self.placement_group_strategy, self.topology_strategy)
        _assign(self, placement_group_strategy=strategy)  # first: others are checked against it
        for name in ("use_gpus", "enable_colocation", "monitor_memory", "unified"):
            _check_flag(name, getattr(self, name))
        slots = _slots(self.max_colocated_worker_groups, self.enable_colocation)
        per_node = self.num_gpus_per_node
        per_node = None if per_node is None else _whole("num_gpus_per_node", per_node, 1)
        bundles = self._bundles(counts, slots)
        if per_node is not None:
            self._check_each_bundle(bundles or (), per_node)
            if self.placement_group_strategy == "STRICT_PACK":
                self._check_devices_per_node(counts, bundles, per_node)
        if self.communication_backend not in COMMUNICATION_BACKENDS:
            known = ", ".join(COMMUNICATION_BACKENDS)
            raise ValueError(f"communication_backend {self.communication_backend!r} is none of {known}")
        _assign(
            self,
            slots=slots,
            request=self._request(counts, slots, bundles),
            alias=_alias(self.name),
            devices=_gpu_ids(self.gpu_ids, counts, per_node),
            timeout_s=_number("timeout_s", self.timeout_s, 0),
            retries=_retries(self.max_retries, os.environ),
            port_range=None if self.port_range is None else check_port_range(self.port_range),
        )

    @property
    def bundle_accelerator(self) -> str | None:
        """Resource name of the accelerator in each bundle, or in some, if there is one."""
        return self.accelerator if self.use_gpus else None

    def of_a_copy(self) -> Self:
        """The same without what only an allocation needs: a function need not travel."""
        copied = copy.copy(self)
        _assign(copied, node_order=None, request=replace(self.request, node_order=None))
        return copied

    def _bundles(self, counts: Sequence[int], slots: int) -> tuple[tuple[dict[str, float], ...], ...] | None:
        """What each bundle holds, where they are told one by one."""
        if self.bundle_specs is None:
            return None
        if self.cpus_per_bundle is not None:
            raise ValueError("bundle_specs say the CPUs of each bundle, so cpus_per_bundle has no meaning")
        if self.gpu_ids is not None and self.gpu_ids != "auto":
            raise ValueError("gpu_ids names devices of bundles that hold one each, not of bundle_specs")
        specs = spread_specs(self.bundle_specs, counts)
        for one in (one for node in specs for one in node):
            one.check_shares(slots)
            if one.gpus and not self.use_gpus:
                raise ValueError(f"{one} contradicts use_gpus=False")
        return tuple(tuple(one.amounts(_accelerator(self.accelerator)) for one in node) for node in specs)

    def _check_each_bundle(self, bundles: Sequence[Sequence[Mapping[str, float]]], per_node: int) -> None:
        for node, held in enumerate(bundles):
            devices = max((one.get(self.accelerator, 0.0) for one in held), default=0.0)
            if devices > per_node:
                raise ValueError(
                    f"a bundle of node {node} asks for {devices:g} {self.accelerator}, more than "
                    f"num_gpus_per_node={per_node}; all of a bundle lies on one physical node"
                )

    def _check_devices_per_node(
        self, counts: Sequence[int], bundles: Sequence[Sequence[Mapping[str, float]]] | None, per_node: int
    ) -> None:
        for node, count in enumerate(counts):
            if bundles is None and self.use_gpus and count > per_node:
                raise ValueError(
                    f"node {node} asks for {count} bundles of one {self.accelerator} each, "
                    f"more than num_gpus_per_node={per_node}; STRICT_PACK keeps them on one physical node, "
                    f"the counts {split_evenly(count, per_node)} or placement_group_strategy='PACK' do not"
                )
            devices = sum(one.get(self.accelerator, 0.0) for one in bundles[node]) if bundles else 0.0
            if devices > per_node:
                raise ValueError(
                    f"node {node} asks for {devices:g} {self.accelerator}, more than "
                    f"num_gpus_per_node={per_node}"
                )

    def _bundle(self, slots: int) -> dict[str, float]:
        cpus = slots if self.cpus_per_bundle is None else _number("cpus_per_bundle", self.cpus_per_bundle, 0)
        bundle = {"CPU": float(cpus)} if cpus else {}
        if self.use_gpus:
            bundle[_accelerator(self.accelerator)] = 1.0
        elif self.gpu_ids is not None:
            raise ValueError(f"gpu_ids={self.gpu_ids!r} contradicts use_gpus=False")
        if not bundle:
            raise ValueError("cpus_per_bundle=0 with use_gpus=False leaves bundles that hold nothing")
        return bundle

    def _request(
        self, counts: tuple[int, ...], slots: int, bundles: tuple[tuple[dict[str, float], ...], ...] | None
    ) -> PlacementRequest:
        pinned = self.gpu_ids is not None and self.gpu_ids != "auto"
        if pinned and self.placement_group_strategy != "STRICT_PACK":
            raise ValueError(
                f"gpu_ids needs STRICT_PACK, not {self.placement_group_strategy}: "
                "it names devices of one node"
            )
        segments, domain = _topology(self.topology_strategy, self.segment_size, counts)
        selector, selectors = _selectors(self.label_selector, counts)
        return PlacementRequest(
            counts,
            self._bundle(slots),
            self.placement_group_strategy,
            selector,
            segments,
            domain,
            distinct_nodes=pinned,
            bundles=bundles,
            node_selectors=selectors,
            node_order=self.node_order,
        )


def _assign(options: ClusterOptions, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _counts(counts: Sequence[int]) -> tuple[int, ...]:
    if isinstance(counts, (str, bytes)) or not isinstance(counts, Sequence):
        raise TypeError(f"bundle_ct_per_node_list is a list of integers, not {counts!r}")
    check_counts(counts)
    return tuple(int(count) for count in counts)


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")


def _accelerator(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"accelerator is the name of a resource, not {name!r}")
    if not name or name == "CPU":
        raise ValueError(f"accelerator {name!r} is not the resource name of an accelerator")
    return name


def _slots(max_colocated_worker_groups: int, enable_colocation: bool) -> int:
    slots = _whole("max_colocated_worker_groups", max_colocated_worker_groups, 1)
    if slots > RESOURCE_STEP:
        raise ValueError(f"max_colocated_worker_groups={slots} is above {RESOURCE_STEP}: Ray shares no finer")
    return max(slots, 2) if enable_colocation else slots


def _retries(max_retries: int | None, environ: Mapping[str, str]) -> int:
    if max_retries is not None:
        return _whole("max_retries", max_retries, 0)
    said = environ.get(RETRIES_VARIABLE, "6")
    if not said.isdigit():
        raise ValueError(f"{RETRIES_VARIABLE}={said!r} is not a number of retries")
    return int(said)


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, Integral)):
        raise TypeError(f"{name} is an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name}={value} is below {least}")
    return int(value)


def _number(name: str, value: float, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} is a number, not {value!r}")
    if not least <= value < float("inf"):
        raise ValueError(f"{name}={value} is not a finite number of at least {least:g}")
    return float(value)


def _alias(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name is a string, not {name!r}")
    return name or "cluster"


def _labels(name: str, labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is not None and not isinstance(labels, Mapping):
        raise TypeError(f"{name} is a mapping of labels, not {labels!r}")
    return dict(labels or {})


def _selectors(
    selector: LabelSelector, counts: Sequence[int]
) -> tuple[dict[str, str], tuple[dict[str, str], ...]]:
    """The labels for all logical nodes, and those for each."""
    if isinstance(selector, (str, bytes)) or not isinstance(selector, Sequence):
        return _labels("label_selector", selector), ()
    if len(selector) != len(counts):
        raise ValueError(f"label_selector has {len(selector)} entries for {len(counts)} nodes")
    return {}, tuple(_labels(f"label_selector of node {i}", one) for i, one in enumerate(selector))


def _strategy(strategy: str, topology: Mapping[str, str] | None) -> str:
    """Strategy per node: what a topology strategy says of nodes counts in place of what is said besides."""
    check_strategy(strategy)
    strategy = _labels("topology_strategy", topology).get(_NODE_ID_LABEL, strategy)
    check_strategy(strategy)
    return strategy


def _topology(
    topology: Mapping[str, str] | None, segment_size: int | None, counts: Sequence[int]
) -> tuple[int | None, str]:
    """Segment size and domain label; a topology strategy makes all nodes one segment."""
    if segment_size is not None:
        segment_size = _whole("segment_size", segment_size, 1)
    labels = _labels("topology_strategy", topology)
    labels.pop(_NODE_ID_LABEL, None)  # which is no domain
    if len(labels) > 1:
        raise ValueError(f"topology_strategy takes one label besides {_NODE_ID_LABEL}, not {sorted(labels)}")
    for label, wish in labels.items():
        if wish != "STRICT_PACK":
            raise ValueError(
                f"topology_strategy {label!r}: {wish!r} is not STRICT_PACK, the only one for a domain"
            )
        return segment_size or sum(count > 0 for count in counts), label
    return segment_size, DOMAIN_LABEL


def _gpu_ids(
    gpu_ids: GpuIds, counts: Sequence[int], per_node: int | None
) -> Literal["auto"] | tuple[tuple[int, ...], ...] | None:
    if gpu_ids is None:
        return None
    if isinstance(gpu_ids, str):
        if gpu_ids != "auto":
            raise ValueError(f"gpu_ids {gpu_ids!r} is neither 'auto' nor a list")
        return "auto"
    if not isinstance(gpu_ids, Sequence):
        raise TypeError(f"gpu_ids is 'auto', a list, or a list per node, not {gpu_ids!r}")
    lists: list[list[Any]]
    per_node_lists = [list(one) for one in gpu_ids if isinstance(one, Sequence) and not isinstance(one, str)]
    if len(per_node_lists) == len(gpu_ids) > 0:
        lists = per_node_lists
    else:
        lists = [list(gpu_ids) if count else [] for count in counts]
    if len(lists) != len(counts):
        raise ValueError(f"gpu_ids has {len(lists)} lists for {len(counts)} nodes")
    for node, (ids, count) in enumerate(zip(lists, counts, strict=True)):
        _check_ids(node, ids, count, per_node)
    return tuple(tuple(int(i) for i in ids) for ids in lists)


def _check_ids(node: int, ids: Sequence[int], count: int, per_node: int | None) -> None:
    for i in ids:
        if _whole(f"gpu_ids of node {node}", i, 0) >= (i + 1 if per_node is None else per_node):
            raise ValueError(
                f"gpu_ids of node {node}: {i} is outside num_gpus_per_node={per_node}, which begin at 0"
            )
    if len(set(ids)) < len(ids):
        raise ValueError(f"gpu_ids of node {node}: {list(ids)} names a device twice")
    if len(ids) != count:
        raise ValueError(f"gpu_ids of node {node} names {len(ids)} devices for {count} bundles")
