"""The arguments of a virtual cluster, checked before Ray is touched."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from raycrew.cluster_core._placement.plan import PlacementRequest, check_counts, check_strategy
from raycrew.cluster_core._ports import check_port_range
from raycrew.cluster_core._topology import DOMAIN_LABEL, RESOURCE_STEP

GpuIds = Literal["auto"] | Sequence[int] | Sequence[Sequence[int]] | None

COMMUNICATION_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "hccl")
RETRIES_VARIABLE = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
_NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Checked arguments of `RayVirtualCluster`.

    Attributes:
        request: What is to be placed where.
        alias: Readable start of all names.
        slots: Worker groups that can share a bundle.
        gpu_ids: Physical devices per logical node, "auto", or None.
        unified: One placement group for all nodes.
        timeout_s: Deadline of the allocation.
        max_retries: How often placement groups are created anew.
        port_range: Ports to lease from.
        communication_backend: What the workers are told to communicate with.
        monitor_memory: Whether memory is watched.
        accelerator: Resource name of the accelerator in each bundle, if there is one.
    """

    request: PlacementRequest
    alias: str
    slots: int
    gpu_ids: Literal["auto"] | tuple[tuple[int, ...], ...] | None
    unified: bool
    timeout_s: float
    max_retries: int
    port_range: tuple[int, int] | None
    communication_backend: str
    monitor_memory: bool
    accelerator: str | None


def check_options(
    bundle_ct_per_node_list: Sequence[int],
    use_gpus: bool,
    max_colocated_worker_groups: int,
    num_gpus_per_node: int,
    name: str,
    placement_group_strategy: str,
    *,
    accelerator: str = "GPU",
    gpu_ids: GpuIds = None,
    enable_colocation: bool = False,
    monitor_memory: bool = False,
    communication_backend: str = "auto",
    cpus_per_bundle: float | None = None,
    unified: bool = False,
    segment_size: int | None = None,
    label_selector: Mapping[str, str] | None = None,
    topology_strategy: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
    max_retries: int | None = None,
    port_range: tuple[int, int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClusterOptions:
    """Check and normalise the arguments of `RayVirtualCluster`, which documents them.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is out of its bounds, or contradicts another one.
    """
    counts = _counts(bundle_ct_per_node_list)
    _check_flags(
        use_gpus=use_gpus,
        enable_colocation=enable_colocation,
        monitor_memory=monitor_memory,
        unified=unified,
    )
    slots = _slots(max_colocated_worker_groups, enable_colocation)
    per_node = _whole("num_gpus_per_node", num_gpus_per_node, 1)
    for node, count in enumerate(counts):
        if use_gpus and count > per_node:
            raise ValueError(
                f"node {node} asks for {count} bundles of one {accelerator} each, "
                f"more than num_gpus_per_node={per_node}"
            )
    cpus = slots if cpus_per_bundle is None else _number("cpus_per_bundle", cpus_per_bundle, 0)
    bundle = {"CPU": float(cpus)} if cpus else {}
    if use_gpus:
        if not isinstance(accelerator, str):
            raise TypeError(f"accelerator is the name of a resource, not {accelerator!r}")
        if not accelerator or accelerator == "CPU":
            raise ValueError(f"accelerator {accelerator!r} is not the resource name of an accelerator")
        bundle[accelerator] = 1.0
    elif gpu_ids is not None:
        raise ValueError(f"gpu_ids={gpu_ids!r} contradicts use_gpus=False")
    if not bundle:
        raise ValueError("cpus_per_bundle=0 with use_gpus=False leaves bundles that hold nothing")
    if communication_backend not in COMMUNICATION_BACKENDS:
        raise ValueError(
            f"communication_backend {communication_backend!r} is none of {', '.join(COMMUNICATION_BACKENDS)}"
        )
    if gpu_ids not in (None, "auto") and placement_group_strategy != "STRICT_PACK":
        raise ValueError(
            f"gpu_ids needs STRICT_PACK, not {placement_group_strategy}: it names devices of one node"
        )
    strategy, segments, domain = _topology(placement_group_strategy, topology_strategy, segment_size, counts)
    pinned = gpu_ids is not None and gpu_ids != "auto"
    request = PlacementRequest(
        counts, bundle, strategy, _labels("label_selector", label_selector), segments, domain, pinned
    )
    return ClusterOptions(
        request=request,
        alias=_alias(name),
        slots=slots,
        gpu_ids=_gpu_ids(gpu_ids, counts, per_node),
        unified=unified,
        timeout_s=_number("timeout_s", timeout_s, 0),
        max_retries=_retries(max_retries, environ),
        port_range=None if port_range is None else check_port_range(port_range),
        communication_backend=communication_backend,
        monitor_memory=monitor_memory,
        accelerator=accelerator if use_gpus else None,
    )


def _counts(counts: Sequence[int]) -> tuple[int, ...]:
    if isinstance(counts, (str, bytes)) or not isinstance(counts, Sequence):
        raise TypeError(f"bundle_ct_per_node_list is a list of integers, not {counts!r}")
    check_counts(counts)
    return tuple(int(count) for count in counts)


def _check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}")


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


def _topology(
    strategy: str, topology: Mapping[str, str] | None, segment_size: int | None, counts: Sequence[int]
) -> tuple[str, int | None, str]:
    """Strategy per node, segment size and domain label; a topology strategy makes all nodes one segment."""
    check_strategy(strategy)
    if segment_size is not None:
        segment_size = _whole("segment_size", segment_size, 1)
    labels = _labels("topology_strategy", topology)
    strategy = labels.pop(_NODE_ID_LABEL, strategy)
    if len(labels) > 1:
        raise ValueError(f"topology_strategy takes one label besides {_NODE_ID_LABEL}, not {sorted(labels)}")
    for label, wish in labels.items():
        if wish != "STRICT_PACK":
            raise ValueError(
                f"topology_strategy {label!r}: {wish!r} is not STRICT_PACK, the only one for a domain"
            )
        return strategy, segment_size or sum(count > 0 for count in counts), label
    return strategy, segment_size, DOMAIN_LABEL


def _gpu_ids(
    gpu_ids: GpuIds, counts: Sequence[int], per_node: int
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


def _check_ids(node: int, ids: Sequence[int], count: int, per_node: int) -> None:
    for i in ids:
        if _whole(f"gpu_ids of node {node}", i, 0) >= per_node:
            raise ValueError(
                f"gpu_ids of node {node}: {i} is outside 0 to {per_node - 1} (num_gpus_per_node)"
            )
    if len(set(ids)) < len(ids):
        raise ValueError(f"gpu_ids of node {node}: {list(ids)} names a device twice")
    if len(ids) != count:
        raise ValueError(f"gpu_ids of node {node} names {len(ids)} devices for {count} bundles")
