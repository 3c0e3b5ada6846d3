"""What one bundle holds, where the bundles of a cluster differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from raycrew.cluster_core._planning.topology import BOOKKEEPING, RESOURCE_STEP

_OWN_ARGUMENTS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSpec:
    """What one bundle holds; the slots of the bundle share it.

    Attributes:
        cpus: CPUs.
        gpus: Devices of the cluster's accelerator: a part of one, or whole ones. Of several, each slot gets
            whole ones, too, or parts that fill them: of two, two slots get one each, four half a one.
        memory: Memory that Ray counts for it, in bytes.
        resources: Custom resources, by Ray's name.

    Raises:
        TypeError: An amount is not a number.
        ValueError: An amount is negative or smaller than Ray can count, it is a part of several devices, a
            resource's name is Ray's own, or the bundle holds nothing.

    Examples:
        >>> trainers, sandboxes = BundleSpec(cpus=2), BundleSpec(cpus=0.5)
        >>> with RayVirtualCluster([1, 2], use_gpus=False, bundle_specs=[trainers, sandboxes]) as cluster:
        ...     print([bundle.resources["CPU"] for bundle in cluster.bundles])
        [2.0, 0.5, 0.5]
    """

    cpus: float = 1
    gpus: float = 0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            _check_amount(name, getattr(self, name))
        if isinstance(self.memory, bool) or not isinstance(self.memory, (int, Integral)):
            raise TypeError(f"memory is a whole number of bytes, not {self.memory!r}")
        _check_amount("memory", self.memory)
        if not isinstance(self.resources, Mapping):
            raise TypeError(f"resources is a mapping of names to amounts, not {self.resources!r}")
        for name, amount in self.resources.items():
            _check_name(name)
            _check_amount(f"resources[{name!r}]", amount)
        _check_devices(self.gpus, self)
        if not self.amounts("GPU"):
            raise ValueError(f"{self} holds nothing")

    def amounts(self, accelerator: str) -> dict[str, float]:
        """The same in Ray's names and units.

        Args:
            accelerator: Ray's name of the resource that `gpus` counts.

        Raises:
            ValueError: That resource is among the custom ones, too.
        """
        if accelerator in self.resources:
            raise ValueError(f"{self}: {accelerator} is the cluster's accelerator, which gpus counts")
        named = {"CPU": self.cpus, accelerator: self.gpus, "memory": self.memory, **self.resources}
        return {name: float(amount) for name, amount in named.items() if amount}

    def check_shares(self, slots: int) -> None:
        """Make sure that a slot's share of the devices is one that Ray can grant.

        Raises:
            ValueError: It is not.
        """
        share, whose = self.gpus / slots, f"{self} for {slots} slots"
        _check_devices(share, whose)
        if share < 1 < self.gpus and slots % self.gpus:
            raise ValueError(
                f"{whose}: parts of {share:.3g} do not fill whole devices; "
                f"take {self.gpus:g} slots or a multiple of that"
            )


def spread_specs(
    specs: BundleSpec | Sequence[BundleSpec | Sequence[BundleSpec]], counts: Sequence[int]
) -> tuple[tuple[BundleSpec, ...], ...]:
    """One for each bundle of each logical node.

    Args:
        specs: One for all bundles, or for each logical node one or a list.
        counts: Bundles of each logical node.

    Raises:
        TypeError: There is something else in it.
        ValueError: A list has the wrong length.
    """
    if isinstance(specs, BundleSpec):
        return tuple((specs,) * count for count in counts)
    _check_list("bundle_specs", specs)
    if len(specs) != len(counts):
        raise ValueError(f"bundle_specs has {len(specs)} entries for {len(counts)} nodes")
    return tuple(_of_node(i, one, count) for i, (one, count) in enumerate(zip(specs, counts, strict=True)))


def _of_node(node: int, specs: Any, count: int) -> tuple[BundleSpec, ...]:
    if isinstance(specs, BundleSpec):
        return (specs,) * count
    _check_list(f"bundle_specs of node {node}", specs)
    for one in specs:
        if not isinstance(one, BundleSpec):
            raise TypeError(f"bundle_specs of node {node} has {one!r}, which is no BundleSpec")
    if len(specs) != count:
        raise ValueError(f"bundle_specs of node {node} has {len(specs)} entries for {count} bundles")
    return tuple(specs)


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} is a BundleSpec or a list of them, not {value!r}")


def _check_amount(name: str, amount: Any) -> None:
    if isinstance(amount, bool) or not isinstance(amount, (int, float, Real)):
        raise TypeError(f"{name} is a number, not {amount!r}")
    if not 0 <= float(amount) < float("inf"):
        raise ValueError(f"{name}={amount} is not a finite number of at least 0")
    if 0 < float(amount) < 1 / RESOURCE_STEP:
        raise ValueError(f"{name}={amount} is less than Ray counts, which is {1 / RESOURCE_STEP:g}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"resources: {name!r} is not the name of a resource")
    if name in _OWN_ARGUMENTS:
        raise ValueError(f"resources: {name} is said by {_OWN_ARGUMENTS[name]}")
    if BOOKKEEPING.search(name):
        raise ValueError(f"resources: {name!r} is a name that Ray keeps for itself")


def _check_devices(amount: float, whose: object) -> None:
    if amount > 1 and amount != int(amount):
        raise ValueError(f"{whose}: {amount:g} devices are neither a part of one nor whole ones")
