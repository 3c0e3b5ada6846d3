"""The pool asked for ahead: hosts and processes start, and load the function, while the driver goes on."""

import os
import uuid

from raycrew.worker_groups._fan_out.processes import Function
from raycrew.worker_groups._fan_out.warm_pool import Ahead, shared_pool
from raycrew.worker_groups._ray import while_connected
from raycrew.worker_groups._worker import pick_secrets


def have_ready(function: Function, limit: int | None, timeout_s: float | None) -> None:
    """Send a batch without items for each process that would work now; nobody waits for the reports.

    Raises:
        WorkerGroupError: This process is not connected to Ray, which does not answer, or the pool was closed.
    """
    pool, call_id, secrets = shared_pool(), uuid.uuid4().hex, pick_secrets((), os.environ)
    before = function.initializer
    keys = function.keys
    code = (pool.argument(function.code), before and pool.argument(before))
    hosts = pool.ahead(limit)
    with pool.with_ahead(keys):
        pool.asked.note(Ahead(call_id, keys, [member for member, _ in hosts]))
        for member, slots in hosts:
            with while_connected(pool.check_open):
                for _ in range(slots):
                    batch = pool.next_batch()
                    member.handle.run.remote(call_id, slots, batch, keys, *code, [], timeout_s, secrets)
