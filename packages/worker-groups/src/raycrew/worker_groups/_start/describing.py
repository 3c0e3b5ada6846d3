"""What a worker class is, learnt where it can be imported."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raycrew.cluster_core import Claim
from raycrew.worker_groups._calls import settle, words
from raycrew.worker_groups._ray import cause_of, is_alive_node, run_on_node, unwrap_actor_class
from raycrew.worker_groups._start.spec import GroupSpec
from raycrew.worker_groups._worker import (
    ClassInfo,
    ClassSource,
    Configured,
    describe,
    describe_class,
    held_class,
    merge_options,
)
from raycrew.worker_groups.errors import WorkerFailureError, WorkerStartTimeoutError


def describe_worker(
    spec: GroupSpec,
    claim: Claim,
    source: ClassSource,
    python: str | None,
    deadline: float | None,
    go_on: Callable[[], object],
    positions: Sequence[int],
) -> ClassInfo:
    """The worker class of a group, described here where it is held already, else in its own environment.

    What it says of single workers is asked for some positions alone, and is in their order. `go_on` is called
    now and then; waiting ends with what it raises.

    Raises:
        WorkerFailureError: It can't be imported there, or that took too long (`WorkerStartTimeoutError`).
    """
    requests = [_request(spec, claim, position) for position in positions]
    held = held_class(spec.builder.worker)
    if held is not None:
        return describe_class(*unwrap_actor_class(held), requests)
    common = merge_options(
        {},
        spec.builder.ray_options,
        Configured(),
        {},
        forwarded=spec.forwarded,
        env_vars=spec.options.variables,
        py_executable=python,
    )
    node_id = claim.bundles[0].node_id
    ref = run_on_node(
        describe_in_environment,
        [source, requests, common.env_vars],
        node_id=node_id if is_alive_node(node_id) else None,
        runtime_env=common.actor.get("runtime_env"),
    )
    settled = settle([ref], deadline, go_on)
    if settled.errors:
        raise _not_described(spec, python, settled.errors[0]) from settled.errors[0]
    if settled.pending:
        raise WorkerStartTimeoutError(
            f"{spec.builder.fqn} could not be described in its environment "
            f"({python or 'the default one'}) within {spec.options.init_timeout_s:g} s",
            group_name=spec.name,
        )
    info: ClassInfo = settled.values[0]
    return info


def _not_described(spec: GroupSpec, python: str | None, error: Exception) -> WorkerFailureError:
    cause, traceback, pid = cause_of(error)
    return WorkerFailureError(
        f"{spec.builder.fqn} can't be used as a worker in its environment "
        f"({python or 'the default one'}): {type(cause).__name__}: {words(cause)}",
        group_name=spec.name,
        method="import",
        cause=cause,
        traceback=traceback,
        pid=pid,
    )


def _request(spec: GroupSpec, claim: Claim, position: int) -> dict[str, Any]:
    seat, bundles = spec.plan.seats[position], claim.bundles
    here = [bundle for bundle in bundles if bundle.node_index == bundles[position].node_index]
    devices = sum(bundle.resources.get("GPU", 0.0) for bundle in here)
    return {
        "num_gpus": claim.actor_options(position).get("num_gpus", 0),
        "bundle_indices": seat.tied_bundles,
        "num_gpus_per_node": math.ceil(round(devices, 4)),  # Ray counts in ten-thousandths.
    }


def describe_in_environment(
    source: ClassSource, requests: Sequence[Mapping[str, Any]], env_vars: Mapping[str, str]
) -> ClassInfo:
    """`describe` as a task of its own, in a process that ends afterwards."""
    os.environ.update(env_vars)
    return describe(source, requests)
