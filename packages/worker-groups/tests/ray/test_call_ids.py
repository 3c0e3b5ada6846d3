"""What tells a call from all others is its task's id, as the worker knows it."""

import os

import ray

from raycrew.worker_groups._ray import call_id


def test_a_calls_id_is_that_of_its_task():
    for index in (1, 2, 300):
        ref = ray.ObjectRef(os.urandom(24) + index.to_bytes(4, "little"))
        assert call_id(ref) == bytes.fromhex(ref.task_id().hex())
