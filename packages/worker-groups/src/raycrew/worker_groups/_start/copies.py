"""What of a group travels to other processes: what calls need, and nothing that only its owner may have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raycrew.worker_groups._ray import is_behind_proxy
from raycrew.worker_groups._start.spec import GroupSpec, RayWorkerBuilder
from raycrew.worker_groups._start.startup import Started
from raycrew.worker_groups._worker import ClassInfo

#: Who waits, who watches, who is told: all of one process.
_OF_ONE_PROCESS = ("_life", "_claim", "_crew", "_in_use", "_unwatch", "_usage", "_supervision", "_diagnoses")


def for_the_way(state: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a group that are pickled: no secrets, no variables or arguments of its workers."""
    spec: GroupSpec = state["_spec"]
    started: Started = state["_started"]
    info = without_options(started.info)
    bare = replace(
        spec,
        builder=RayWorkerBuilder(spec.builder.fqn),
        options=replace(
            spec.options,
            init=None,
            env_vars=None,
            launchers=None,
            environments=None,
            transport=None,
            on_worker_failure=None,
            diagnose=False,
        ),
        init_kwargs={},
        forwarded={},
        secrets={},
    )
    return {
        **{name: value for name, value in state.items() if name not in _OF_ONE_PROCESS},
        "_spec": bare,
        "_started": replace(started, options=[], info=info, spare_port=0),
        "_shape": replace(state["_shape"], info=info),
        "_balancer": state["_balancer"] is not None,
        # Behind a proxy a session is this process's own; where this arrives, the handles are that one's.
        "_session": None if is_behind_proxy() else state["_session"],
    }


def without_options(info: ClassInfo) -> ClassInfo:
    """A worker class as those need it who call it: without its options, and what it says of each worker."""
    return replace(info, options={}, configured=())
