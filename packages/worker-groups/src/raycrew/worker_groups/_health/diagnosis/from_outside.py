"""Diagnoses of groups of any driver, made by whoever looks at the cluster."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._health.diagnosis.asking import ALL_BYTES
from raycrew.worker_groups._health.diagnosis.diagnosis import Diagnosis, Who, diagnosed
from raycrew.worker_groups._health.diagnosis.making import Group, Where, leave
from raycrew.worker_groups._health.diagnosis.parts import Findings
from raycrew.worker_groups._health.roster import Found, GroupRecord, WorkerRecord, examine_groups


def diagnose_groups(
    timeout_s: float = 15.0, names: Sequence[str] = (), within: Where = None, lines: int = 0
) -> Found[Diagnosis]:
    """Find out what all ranks of all groups are at, or of some, and leave it in a new folder for each.

    It is what `RayWorkerGroup.diagnose` finds out, but for this: only the group's owner knows the values of
    its secrets and takes them out, so the output of ranks is left out, unless it is asked for; nor is it
    known where `env_vars` have recorders of collectives write.

    Args:
        timeout_s: For Ray's control service and all nodes together.
        names: Which groups; all for none.
        within: Where to make the folders; by default among temporary files.
        lines: How many of the last lines of each rank's output and errors to leave, as they are.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
        OSError: They can't be written.
        UnknownGroupError: There is none of a name.
        WorkerGroupError: This process is not connected to Ray.
    """
    made_at = time.time()

    def wanted(worker: WorkerRecord, n_ranks: int) -> Mapping[str, Any]:
        parts: dict[str, Any] = {"stacks": True, "share_bytes": ALL_BYTES // n_ranks}
        records = {"rank": worker.rank, "prefixes": []} if worker.rank >= 0 else {}
        return parts | records | ({"lines": lines} if lines else {})

    found = examine_groups(timeout_s, names, wanted)
    return Found((_left(record, told, made_at, within) for record, told in found), found.n_unread)


def _left(
    record: GroupRecord, told: Sequence[Mapping[str, Any] | str], made_at: float, within: Where
) -> Diagnosis:
    findings = [Findings.nothing(one) if isinstance(one, str) else Findings.of(one) for one in told]
    n_ranks = len(record.workers)
    found = {worker.rank: one for worker, one in zip(record.workers, findings[:n_ranks], strict=True)}
    known = zip(map(_who, record.processes), findings, strict=True)
    everybody = [diagnosed(who, one) for who, one in known]
    ranks, standbys = everybody[:n_ranks], everybody[n_ranks:]
    reason = "asked for from outside" + (f"; {record.start.note(made_at)}" if record.start else "")
    about = Group(record.name, record.worker_class, record.generation)
    return leave(about, ranks, found, reason, made_at, within, standbys)


def _who(worker: WorkerRecord) -> Who:
    return Who(
        *(worker.rank, worker.pid, worker.node_id, worker.node_address),
        *(worker.bundle_index, worker.device),
    )
