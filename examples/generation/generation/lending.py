"""Bundles whose devices are left to what an engine starts on them, as vLLM does with its executor `ray`.

vLLM looks for the placement group that its process is in, and starts a process of its own on those bundles
that VLLM_RAY_BUNDLE_INDICES names, each of which takes VLLM_RAY_PER_WORKER_GPUS. So workers take no device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from generation.errors import RefusedError
from raycrew.cluster_core import Bundle, Claim, Cluster, Rendezvous
from raycrew.worker_groups import RankInfo

T = TypeVar("T")

#: So that Ray does not hide all devices from a process that has none of its own.
VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bundle is, for Ray.

    Attributes:
        group: Its placement group.
        index: Its number in that.
        devices: How many GPUs it holds.
        share: How much of them one slot of it has.
        node: Its node.
    """

    group: str
    index: int
    devices: float
    share: float
    node: str = ""


def engine_variables(places: Sequence[Place], size: int, is_updated: bool = False) -> list[dict[str, str]]:
    """What the leader of each engine has in its environment, engine by engine.

    Args:
        places: Of all bundles, those of an engine side by side.
        size: How many bundles an engine has.
        is_updated: Whether its weights are.

    Raises:
        RefusedError: vLLM can't be on these bundles, or its weights can't be updated there.
    """
    engines = [places[start : start + size] for start in range(0, len(places), size)]
    if is_updated and any(len({place.node for place in engine}) > 1 for engine in engines):
        raise RefusedError(
            "weights reach an engine's processes on its leader's node alone, and this one would have some "
            "on other nodes: give it bundles of one node, or no directory"
        )
    return [_variables(engine) for engine in engines]


def _variables(places: Sequence[Place]) -> dict[str, str]:
    if wrong := {place.devices for place in places} - {1}:
        raise RefusedError(f"the executor 'ray' needs bundles of one GPU each, not of {min(wrong):g}")
    if len({place.group for place in places}) > 1:
        raise RefusedError(
            "the executor 'ray' needs all bundles of an engine in one placement group: make the cluster with "
            "unified=True, or have no engine over several of its nodes"
        )
    return {
        "VLLM_RAY_BUNDLE_INDICES": ",".join(str(place.index) for place in places),
        "VLLM_RAY_PER_WORKER_GPUS": f"{places[0].share:g}",
    }


class Lent:
    """A `Cluster` on whose bundles workers hold a slot, and take of it no device.

    Args:
        cluster: The bundles.
        size: How many consecutive ones an engine has.
        is_updated: Whether its weights are.
    """

    def __init__(self, cluster: Cluster, size: int, is_updated: bool) -> None:
        self._cluster, self._size, self._is_updated = cluster, size, is_updated
        self._claim: Claim | None = None
        self._of_engines: Sequence[Mapping[str, str]] = ()

    @property
    def bundles(self) -> Sequence[Bundle]:
        """See `Cluster`."""
        return self._cluster.bundles

    def claim(self, indices: Sequence[int] | None, holder: str) -> Claim:
        """See `Cluster`.

        Raises:
            RefusedError: vLLM can't be on these bundles; they are free again.
        """
        claim = self._cluster.claim(indices, holder)
        try:
            places = [_place(claim, position) for position in range(len(claim.bundles))]
            self._of_engines = engine_variables(places, self._size, self._is_updated)
            self._claim = claim
        except BaseException:
            claim.release()
            raise
        return _WithoutDevices(claim)

    def rendezvous(self, bundle_index: int = 0, n_ports: int = 1) -> Rendezvous:
        """See `Cluster`."""
        return self._cluster.rendezvous(bundle_index, n_ports)

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """See `Cluster`."""
        return self._cluster.run_on_each_node(fn)

    def variables(self, rank: RankInfo) -> Mapping[str, str]:
        """What a worker has in its environment before it makes its engine."""
        bundles = [] if self._claim is None else [bundle.index for bundle in self._claim.bundles]
        return self._of_engines[bundles.index(rank.bundle_index) // self._size]


def _place(claim: Claim, position: int) -> Place:
    options, bundle = claim.actor_options(position), claim.bundles[position]
    where = options["scheduling_strategy"]
    devices = bundle.resources.get("GPU", 0.0)
    group = where.placement_group.id.hex()
    index = where.placement_group_bundle_index
    return Place(group, index, devices, options["num_gpus"], bundle.node_id)


class _WithoutDevices:
    """A claim whose actors take no device; which ones there are nobody on it can tell."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self.check, self.give_back, self.release = claim.check, claim.give_back, claim.release

    @property
    def bundles(self) -> Sequence[Bundle]:
        return self._claim.bundles

    def actor_options(self, position: int) -> dict[str, Any]:
        return {**self._claim.actor_options(position), "num_gpus": 0}

    def learn(self, devices: Mapping[int, int]) -> None:
        pass

    def settle(self) -> None:
        pass
