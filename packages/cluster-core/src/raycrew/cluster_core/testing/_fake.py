"""A cluster without Ray, and what every `Cluster` must do."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from raycrew.cluster_core._placement import LedgerClaim, SlotLedger, at
from raycrew.cluster_core._planning import Bundle, BundleSpec, Rendezvous, check_counts, spread_specs
from raycrew.cluster_core.errors import BundlesOccupiedError, ClusterClosedError
from raycrew.cluster_core.protocols import Claim, Cluster

T = TypeVar("T")


class FakeCluster:
    """A `Cluster` that needs no Ray: its nodes are numbers, and functions run in this process.

    Args:
        bundle_ct_per_node_list: Bundles per logical node; zeros leave holes in the node numbers.
        use_gpus: Whether each bundle holds a GPU besides its CPUs.
        max_colocated_worker_groups: Slots per bundle.
        cpus_per_bundle: CPUs of each bundle; one per slot when not given.
        bundle_specs: In place of `use_gpus` and `cpus_per_bundle`, what the bundles hold where they are not
            alike: as for `RayVirtualCluster`.

    Raises:
        TypeError: A count is no integer, or `bundle_specs` has something else in it than `BundleSpec`s.
        ValueError: A count is below 0, or all are 0; `bundle_specs` has the wrong length, or a share of a
            bundle's devices is none that Ray can grant.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int] = (2,),
        *,
        use_gpus: bool = False,
        max_colocated_worker_groups: int = 1,
        cpus_per_bundle: float | None = None,
        bundle_specs: BundleSpec | Sequence[BundleSpec | Sequence[BundleSpec]] | None = None,
    ) -> None:
        check_counts(bundle_ct_per_node_list)
        self.closed = False
        slots = max_colocated_worker_groups
        alike = BundleSpec(cpus=slots if cpus_per_bundle is None else cpus_per_bundle, gpus=int(use_gpus))
        by_node = spread_specs(alike if bundle_specs is None else bundle_specs, bundle_ct_per_node_list)
        specs = [(node, one) for node, held in enumerate(by_node) for one in held]
        for _, one in specs:
            one.check_shares(slots)
        seats = [
            Bundle(i, node, f"{node:056x}", "127.0.0.1", one.amounts("GPU"))
            for i, (node, one) in enumerate(specs)
        ]
        self._ledger = SlotLedger(seats, slots)
        self._ports = itertools.count(20_000)

    @property
    def bundles(self) -> Sequence[Bundle]:
        """All bundles, ordered by (node, device index)."""
        return self._open().bundles

    def claim(self, indices: Sequence[int] | None, holder: str) -> LedgerClaim:
        """Take one slot on each named bundle (all of them for None) for `holder`.

        Raises:
            ValueError: An index is out of range or repeated.
            BundlesOccupiedError: A bundle has no free slot.
        """
        ledger = self._open()
        slot, held = ledger.take(indices, holder), lambda: not self.closed
        return LedgerClaim(ledger, slot, lambda _seat: "DEFAULT", lambda _seats: self._open(), held)

    def rendezvous(self, bundle_index: int = 0, n_ports: int = 1) -> Rendezvous:
        """Hand out port numbers that this cluster never handed out before; nothing listens on them.

        Raises:
            IndexError: There is no such bundle.
            ValueError: `n_ports` is below one.
        """
        bundle = at(self.bundles, bundle_index, "bundle index")
        if n_ports < 1:
            raise ValueError(f"n_ports is {n_ports}; it is at least one")
        return Rendezvous(bundle.node_id, bundle.node_address, tuple(itertools.islice(self._ports, n_ports)))

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once per node, here and one after the other."""
        for node_id in dict.fromkeys(bundle.node_id for bundle in self.bundles):
            yield node_id, fn()

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index."""
        return self._ledger.holders()

    def shutdown(self) -> None:
        """End the cluster; idempotent."""
        self.closed = True

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _open(self) -> SlotLedger:
        if self.closed:
            raise ClusterClosedError("this cluster was shut down")
        return self._ledger


def check_cluster(cluster: Cluster) -> None:
    """Check what every `Cluster` must do; `cluster` has no claims and one slot per bundle.

    Raises:
        AssertionError: It does something else; the message says what.
    """
    bundles = cluster.bundles
    _check([b.index for b in bundles] == list(range(len(bundles))), "bundles are not numbered in their order")
    _check(
        [b.node_index for b in bundles] == sorted(b.node_index for b in bundles),
        "bundles are not in node order",
    )
    whole = cluster.claim(None, "whole")
    _check(isinstance(whole, Claim), "a claim lacks something of `raycrew.cluster_core.Claim`")
    _check(len(whole.bundles) == len(bundles), "a claim on None is not a claim on all bundles")
    _check(_refuses(cluster, [0], "late"), "a full bundle took one claim more")
    whole.give_back([0])
    whole.give_back([0])
    _check(not _refuses(cluster, [0], "next"), "a bundle that was given back alone is not free")
    whole.check()
    _check(len(whole.bundles) == len(bundles), "positions changed when one bundle was given back")
    rest = range(1, len(bundles))
    _check(all(_refuses(cluster, [i], "late") for i in rest), "the others went back with it")
    whole.release()
    whole.release()
    one = cluster.claim([len(bundles) - 1], "one")
    _check(one.bundles[0].index == len(bundles) - 1, "a claim is not on the bundle that was named")
    one.check()
    options = set(one.actor_options(0))
    _check(
        options >= {"num_cpus", "num_gpus", "resources", "scheduling_strategy"},
        f"actor options are only {options}",
    )
    one.release()
    for indices in ([len(bundles)], [-1], [0, 0]):
        _check(_refuses(cluster, indices, "wrong", ValueError), f"bundle indices {indices} were taken")
    first, second = cluster.rendezvous(0, 2), cluster.rendezvous(0, 1)
    _check(first.node_id == bundles[0].node_id, "the rendezvous is not on the bundle's node")
    _check(len({*first.ports, *second.ports}) == 3, "a port was handed out twice")
    nodes = [node_id for node_id, result in cluster.run_on_each_node(_three) if result == 3]
    _check(sorted(nodes) == sorted({b.node_id for b in bundles}), f"a function ran on {nodes}")


def _three() -> int:
    return 3


def _refuses(
    cluster: Cluster, indices: Sequence[int], holder: str, error: type[Exception] = BundlesOccupiedError
) -> bool:
    try:
        cluster.claim(indices, holder).release()
    except error:
        return True
    return False


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
