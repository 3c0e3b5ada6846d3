"""What a group tells of what its workers are at: their output, and bundles of all that can be found out."""

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from os import PathLike

from raycrew.worker_groups._health.diagnosis.automatic import Diagnoses
from raycrew.worker_groups._health.diagnosis.diagnosis import Diagnosis
from raycrew.worker_groups._health.diagnosis.making import ALL, SOON_S, Subjects, Where, begin, make
from raycrew.worker_groups._health.diagnosis.parts import Findings, Wanted
from raycrew.worker_groups._health.diagnosis.writing import check_folder
from raycrew.worker_groups._health.group_health import GroupHealth, Workers
from raycrew.worker_groups._health.reports import StuckWorker, checked_patience
from raycrew.worker_groups.errors import WorkerGroupError

_DOUBT_S = 0.5  # for who is idle to say that it lives


class GroupDiagnosis(GroupHealth):
    """What a group tells of its workers' output and stacks."""

    _diagnoses: Diagnoses | None = None  # copies make none

    def _begin_diagnoses(self, option: bool | str | PathLike[str]) -> None:
        """From now on make diagnoses where something goes wrong, if that is wanted."""
        # The group and its futures hold what makes them: that keeps no group from being given back.
        diagnose = weakref.WeakMethod(self.diagnose)

        def made(within: Where, why: str) -> Diagnosis:
            if (of_group := diagnose()) is None:
                raise WorkerGroupError("the group that it would be of is gone")
            return of_group(within, SOON_S, reason=why)

        self._diagnoses = begin(option, made)

    @property
    def _tell_diagnosis(self) -> Callable[[WorkerGroupError, Hashable], object] | None:
        """Has the error of a call say where a diagnosis lies; None where none are made."""
        return None if self._diagnoses is None else self._diagnoses.tell

    def _note_stuck(self, stuck: Mapping[int, StuckWorker]) -> dict[int, StuckWorker]:
        if not stuck or self._diagnoses is None:
            return dict(stuck)
        whose = [(rank, worker.pid, worker.sequence, worker.reason) for rank, worker in stuck.items()]
        folder = self._diagnoses.folder_for("; ".join(map(str, stuck.values())), whose)
        return {rank: replace(worker, diagnosis=folder) for rank, worker in stuck.items()}

    @abstractmethod
    def _to_diagnose(self) -> Subjects:
        """The workers of this moment."""

    @abstractmethod
    def _examine(
        self, subjects: Subjects, ranks: Sequence[int], wanted: Wanted, timeout_s: float
    ) -> Mapping[int, Findings]:
        """What is found of some workers, or of those that stand by, whatever they are at."""

    def logs(self, rank: int, lines: int = 100, timeout: float = 5.0) -> str:
        """The last lines of a worker's standard output, then those of its standard error.

        Its node's watch reads them from where Ray has them written, whatever the worker is at, and after its
        death; empty lines are left out. What this process shows of its workers' output may come later, or be
        left out by Ray.

        Args:
            rank: Whose.
            lines: How many of each.
            timeout: Seconds for the node to answer.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: There is no such rank; `lines` is below 1; `timeout` is `nan`, or below zero.
            WorkerGroupError: The output can't be had; the message says why.
            WorkerGroupClosedError: The group was shut down.
        """
        timeout = checked_patience(timeout)
        self._open()
        subjects = self._to_diagnose()
        if rank not in range(len(subjects.ranks)):
            raise ValueError(f"{self.name!r} has no rank {rank!r}: they are 0 to {len(subjects.ranks) - 1}")
        if isinstance(lines, bool) or not isinstance(lines, int) or lines < 1:
            raise ValueError(f"lines is {lines!r}; it is a whole number of at least 1")
        found = self._examine(subjects, [rank], Wanted(lines=lines), timeout)[rank]
        why = found.missing.get("output") or found.missing.get("state")
        if why and not found.output:
            raise WorkerGroupError(f"the output of rank {rank} of {self.name!r} can't be had: {why}")
        return found.output

    def diagnose(
        self,
        folder: str | PathLike[str] | None = None,
        timeout: float = 10.0,
        *,
        reason: str = "asked for",
    ) -> Diagnosis:
        """Find out what all ranks are at, and leave it in a new folder on this machine, as text and as JSON.

        It has the state of each rank, with its calls and how much it uses; the stacks of all its threads, by
        py-spy where that is installed, else by faulthandler; the last 100 lines of its output; and the file
        of torch's recorder of NCCL's operations ("flight recorder"), where one was written since the rank's
        process began, to be read with `torchfrtrace`; and the same of workers that stand by, without that
        file. The watches of their nodes tell, whatever they are at. A part that can't be had in time says
        why, and the others are there all the same.

        The values of declared secrets are taken out, and each of their lines (of six letters or more), also
        as `repr` and JSON write them; no variables of the environment are read but those that say where that
        recorder writes. What else workers print is in it.

        Args:
            folder: Where to make the new folder, which gets mode 0700; by default among temporary files.
            timeout: Seconds for all nodes together.
            reason: Said in it.

        Raises:
            OSError: It can't be written.
            TypeError: `timeout` is no number.
            ValueError: What is named is no folder; or `timeout` is `nan`, or below zero.
            WorkerGroupClosedError: The group was shut down.
        """
        timeout = checked_patience(timeout)
        self._open()
        check_folder("folder", folder)
        subjects, made_at = self._to_diagnose(), time.time()
        workers = self._workers()
        found = dict(self._examine(subjects, list(subjects.processes), ALL, timeout))
        for rank in self._just_died(workers, found):
            found[rank] = found[rank].of_dead()
        return make(self.name, subjects, found, reason, made_at, folder)

    def _just_died(self, workers: Workers, found: Mapping[int, Findings]) -> list[int]:
        """Those whose processes were seen to be idle, and are dead for Ray: they are about to be gone."""
        idle = [rank for rank, own in found.items() if rank >= 0 and own.is_idle]
        states = self._answers(workers, idle, _DOUBT_S) if idle else {}
        return [rank for rank, state in states.items() if state == "dead"]
