"""What is left with Ray's control service for others to read, and actors of other drivers by their names."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.experimental import internal_kv

from raycrew.worker_groups._ray.gate import ANSWER_S, ask

_SPACE = b"raycrew"

#: Namespace and name of an actor.
ActorName = tuple[str, str]


def put_record(
    key: str, text: str, timeout_s: float = ANSWER_S, undo: Callable[[], object] | None = None
) -> None:
    """Leave a text for others to read, in place of an earlier one of this key.

    Args:
        key: Where.
        text: What.
        timeout_s: Seconds until it is given up.
        undo: Called when it was given up, and is there all the same.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    put: Any = internal_kv._internal_kv_put  # noqa: SLF001 - Ray has no public place for this
    ask(
        lambda: put(key.encode(), text.encode(), overwrite=True, namespace=_SPACE),
        timeout_s=timeout_s,
        undo=None if undo is None else lambda _: undo(),
    )


def drop_records(keys: Iterable[str], timeout_s: float = ANSWER_S) -> None:
    """Take texts away; one that is not there is no error.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    drop: Any = internal_kv._internal_kv_del  # noqa: SLF001
    ask(lambda: [drop(key.encode(), namespace=_SPACE) for key in keys], timeout_s=timeout_s)


def records(prefix: str, timeout_s: float = ANSWER_S) -> dict[str, str]:
    """All texts that somebody has left under keys with this beginning.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    found = ask(lambda: _records(prefix.encode()), timeout_s=timeout_s)
    return {key.decode(): text.decode(errors="replace") for key, text in found.items()}


def _records(prefix: bytes) -> dict[bytes, bytes]:
    keys: list[bytes] = internal_kv._internal_kv_list(prefix, namespace=_SPACE)  # noqa: SLF001
    client_of: Any = internal_kv.internal_kv_get_gcs_client
    client = client_of()
    if client is not None:
        return dict(client.internal_kv_multi_get(keys, _SPACE)) if keys else {}
    get: Any = internal_kv._internal_kv_get  # noqa: SLF001 - through a proxy, which has no way to get several
    texts = {key: get(key, namespace=_SPACE) for key in keys}
    return {key: text for key, text in texts.items() if text is not None}  # else taken away meanwhile


def living_jobs(timeout_s: float = ANSWER_S) -> set[str] | None:
    """All jobs whose drivers live; None where this is not known, as behind a `ray://` proxy.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    client_of: Any = internal_kv.internal_kv_get_gcs_client
    client = client_of()
    if client is None:
        return None
    jobs = ask(
        lambda: client.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=timeout_s
        ),
        timeout_s=timeout_s,
    )
    return {job_id.hex() for job_id, job in jobs.items() if not job.is_dead}


def named_actors(timeout_s: float = ANSWER_S) -> set[ActorName]:
    """All actors of the cluster that live and have a name.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    found: Any = ask(lambda: ray.util.list_named_actors(all_namespaces=True), timeout_s=timeout_s)
    return {(actor["namespace"], actor["name"]) for actor in found}


def find_actors(names: Sequence[ActorName], timeout_s: float = ANSWER_S) -> dict[ActorName, Any]:
    """The handles of those of these actors that are still there.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    return dict(ask(lambda: list(_found(names)), timeout_s=timeout_s))


def _found(names: Iterable[ActorName]) -> Iterable[tuple[ActorName, Any]]:
    for namespace, name in names:
        try:
            yield (namespace, name), ray.get_actor(name, namespace)
        except ValueError:  # it has ended meanwhile
            continue
