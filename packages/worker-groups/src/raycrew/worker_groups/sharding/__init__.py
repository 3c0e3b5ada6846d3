"""Ranks: which worker gets which from where it is, and named axes over them."""

from raycrew.worker_groups.sharding._named import NamedSharding
from raycrew.worker_groups.sharding._named import check_axes as check_axes
from raycrew.worker_groups.sharding._places import first_seats as first_seats
from raycrew.worker_groups.sharding._places import moved_seats as moved_seats
from raycrew.worker_groups.sharding._places import resized as resized
from raycrew.worker_groups.sharding._places import with_seats as with_seats
from raycrew.worker_groups.sharding._ranks import RankInfo as RankInfo
from raycrew.worker_groups.sharding._ranks import Seat as Seat
from raycrew.worker_groups.sharding._ranks import SeatPlan as SeatPlan
from raycrew.worker_groups.sharding._ranks import TiedBundles as TiedBundles
from raycrew.worker_groups.sharding._ranks import WorkerFacts as WorkerFacts
from raycrew.worker_groups.sharding._ranks import assign_ranks as assign_ranks
from raycrew.worker_groups.sharding._ranks import final_indices as final_indices
from raycrew.worker_groups.sharding._ranks import plan_seats as plan_seats
from raycrew.worker_groups.sharding._ranks import rank_environment as rank_environment
from raycrew.worker_groups.sharding._ranks import rank_order as rank_order

__all__ = ["NamedSharding"]
