"""What a started group tells of itself."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core import Claim, Placement
from raycrew.worker_groups._calls import Whereabouts, unknown_attribute
from raycrew.worker_groups._health import Seen, Subjects
from raycrew.worker_groups._on_nodes import RECORDS
from raycrew.worker_groups._start.report import StartupReport
from raycrew.worker_groups._start.spec import GroupSpec, worker_aliases
from raycrew.worker_groups._start.startup import Handle, Started
from raycrew.worker_groups.sharding import RankInfo, Seat, WorkerFacts


class GroupFacts:
    """Who the workers of a group are, where they are, and how they started."""

    _spec: GroupSpec
    _started: Started
    _claim: Claim
    _tied_groups: list[list[int]]
    _places: dict[int, Whereabouts]
    _placements: list[Placement]

    if not TYPE_CHECKING:  # Type checkers are to find what is misspelt.

        def __getattr__(self, name: str) -> Any:
            """Point at the way to call a method of the workers, which a group does not have itself."""
            started = vars(self).get("_started")
            raise unknown_attribute(self, name, () if started is None else started.info.methods)

    def _note_death(self, rank: int, facts: WorkerFacts, seen: Seen | str) -> None:
        place = self._places.get(rank)
        if place is not None and place.facts == facts:
            place.note_death(seen if isinstance(seen, Seen) else None)

    def _to_diagnose(self) -> Subjects:
        """The workers for a diagnosis; a copy knows no secrets, and not where recorders may write."""
        started = self._started
        prefixes = {
            rank: [own[name] for name in RECORDS if own.get(name)]
            for rank, position in enumerate(started.order)
            if started.options and (own := started.options[position].env_vars)
        }
        return Subjects(self._spec.builder.fqn, started.ranks, started.facts, self._spec.secrets, prefixes)

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._spec.name

    @property
    def workers(self) -> list[Handle]:
        """Handles in rank order; they have the worker's methods, as `handle.method.remote(...)`."""
        return list(self._started.handles)

    @property
    def ranks(self) -> list[RankInfo]:
        """Where each rank is."""
        return list(self._started.ranks)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._started.ranks)

    @property
    def startup(self) -> StartupReport:
        """How long the phases of the start-up took; `print_startup` shows it."""
        return self._started.report

    @property
    def master_address(self) -> str:
        """Address of rank 0's node."""
        return self._started.ranks[0].master_address

    @property
    def master_port(self) -> int:
        """Port that rank 0 has leased for the group's rendezvous."""
        return self._started.ranks[0].master_port

    @property
    def tied_workers_groups(self) -> list[list[int]]:
        """Ranks of each tied group, leader first; without tied groups each rank is one of its own."""
        return [list(group) for group in self._tied_groups]

    @property
    def group_count(self) -> int:
        """Number of tied groups."""
        return len(self._tied_groups)

    @property
    def worker_to_tied_group_index(self) -> dict[int, int]:
        """Tied group of each rank."""
        return {rank: i for i, group in enumerate(self._tied_groups) for rank in group}

    @property
    def placements(self) -> list[Placement]:
        """Which bundle each rank occupies, and how much of it."""
        return list(self._placements)

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """Where each rank is, under the names that are usual in this field."""
        tied = self.worker_to_tied_group_index
        aliases = worker_aliases(self.name, self._spec.plan)
        return [
            {
                "node_idx": self._spec.plan.seats[position].bundle.node_index,
                "local_rank": info.local_rank,
                "global_rank": info.rank,
                "name": aliases[position],
                "bundle_indices": self._bundle_indices(info, self._spec.plan.seats[position]),
                "tied_group_idx": tied[info.rank],
            }
            for info, position in zip(self._started.ranks, self._started.order, strict=True)
        ]

    def _bundle_indices(self, info: RankInfo, seat: Seat) -> tuple[int, list[int]] | None:
        """The node and the bundles on it; devices may have given a worker's bundle another place there."""
        if seat.tied_bundles is None or self._spec.plan.ordered:
            return seat.tied_bundles
        node, (planned,) = seat.tied_bundles
        return node, [planned + info.bundle_index - seat.bundle.index]

    def __len__(self) -> int:
        return self.world_size

    @property
    def generation(self) -> int:
        """0 at first; grows with every restart."""
        return self._started.ranks[0].generation

    def print_worker_layout(self, console: Console | None = None) -> None:
        """Print where each rank is."""
        table = Table(title=Text(repr(self), style="table.title"))
        for column in ("rank", "tied group", "node", "address", "local rank", "bundle", "device", "pid"):
            table.add_column(column, justify="right")
        tied = self.worker_to_tied_group_index
        for info, facts in zip(self._started.ranks, self._started.facts, strict=True):
            device = "" if info.device_index is None else f"{facts.device_kind}:{info.device_index}"
            row = (info.rank, tied[info.rank], info.node_rank, info.node_address, info.local_rank)
            table.add_row(*(Text(str(cell)) for cell in (*row, info.bundle_index, device, facts.pid)))
        (console or Console()).print(table)

    def print_startup(self, console: Console | None = None) -> None:
        """Print how long each phase of the start-up took."""
        (console or Console()).print(self.startup.table())
