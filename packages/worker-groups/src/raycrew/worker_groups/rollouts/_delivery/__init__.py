"""Where prompts that are done go, and what is known of them by whoever goes on later."""

from raycrew.worker_groups.rollouts._delivery.delivery import Delivery
from raycrew.worker_groups.rollouts._delivery.jsonl import JsonLines
from raycrew.worker_groups.rollouts._delivery.progress import Done, Progress, in_hand

__all__ = ["Delivery", "Done", "JsonLines", "Progress", "in_hand"]
