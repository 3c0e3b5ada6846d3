"""Making a diagnosis of some workers of a group, which may be only just starting."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import NamedTuple

from raycrew.worker_groups._health.diagnosis.asking import examine
from raycrew.worker_groups._health.diagnosis.automatic import Diagnoses
from raycrew.worker_groups._health.diagnosis.concealing import forms_of, without
from raycrew.worker_groups._health.diagnosis.diagnosis import (
    Diagnosis,
    RankDiagnosis,
    diagnosed,
    who_is,
    who_stands_by,
)
from raycrew.worker_groups._health.diagnosis.parts import Findings, Wanted
from raycrew.worker_groups._health.diagnosis.writing import new_folder, write
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import RankInfo, WorkerFacts

#: What of each worker is in a diagnosis.
ALL = Wanted(lines=100, stacks=True, records=True)
SOON_S = 5.0  # for a diagnosis that nobody has asked for

Where = str | PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Subjects:
    """The workers of a group at one moment, for a diagnosis.

    Attributes:
        worker_class: Fully qualified name of their class.
        ranks: Who they are, in rank order.
        facts: What is known of their processes, in rank order.
        secrets: What shows up in no bundle, by name.
        prefixes: Where recorders of collectives were told to write, by rank.
        standbys: The bundles of workers that stand by, and what is known of their processes.
    """

    worker_class: str
    ranks: Sequence[RankInfo]
    facts: Sequence[WorkerFacts]
    secrets: Mapping[str, str] = field(repr=False)
    prefixes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    standbys: Sequence[tuple[int, WorkerFacts]] = ()

    @property
    def processes(self) -> dict[int, WorkerFacts]:
        """All of them by rank, with those that stand by under -1, -2 and so on."""
        standing_by = {-1 - position: facts for position, (_, facts) in enumerate(self.standbys)}
        return dict(enumerate(self.facts)) | standing_by


def make(
    name: str,
    subjects: Subjects,
    found: Mapping[int, Findings],
    reason: str,
    made_at: float,
    within: Where,
) -> Diagnosis:
    """Leave what was found in a new folder.

    Args:
        name: Name of the group.
        subjects: Whose it is.
        found: What was found of each, by rank, and by the numbers of those that stand by.
        reason: Why.
        made_at: When, in seconds since the epoch.
        within: Where to make the folder.
    """
    forms = forms_of(subjects.secrets)
    ranks = [
        diagnosed(who_is(info, facts), _bare(found[info.rank], forms), subjects.prefixes.get(info.rank, ()))
        for info, facts in zip(subjects.ranks, subjects.facts, strict=True)
    ]
    standbys = [
        diagnosed(who_stands_by(*standby), _bare(found[-1 - position], forms))
        for position, standby in enumerate(subjects.standbys)
    ]
    about = Group(name, subjects.worker_class, subjects.ranks[0].generation)
    return leave(about, ranks, found, without(reason, forms), made_at, within, standbys)


class Group(NamedTuple):
    """Of which group a diagnosis is."""

    name: str
    worker_class: str
    generation: int


def leave(
    group: Group,
    ranks: Sequence[RankDiagnosis],
    found: Mapping[int, Findings],
    reason: str,
    made_at: float,
    within: Where,
    standbys: Sequence[RankDiagnosis] = (),
) -> Diagnosis:
    """Leave what is known of all ranks of a group in a new folder; see `make`."""
    folder = new_folder(group.name, within)
    diagnosis = Diagnosis(*group, reason, made_at, tuple(ranks), folder, tuple(standbys))
    try:
        write(diagnosis, {r.flight_record: found[r.rank].record for r in ranks if r.flight_record})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return diagnosis


def begin(option: bool | str | PathLike[str], make: Callable[[Where, str], Diagnosis]) -> Diagnoses | None:
    """Diagnoses that are made without being asked for, if these are wanted.

    Args:
        option: Where, or whether.
        make: Makes one within a folder, of a reason.
    """
    within = None if option is True else option
    return None if within is False else Diagnoses(lambda why: make(within, why))


def tell_of_start(
    error: WorkerGroupError, name: str, subjects: Subjects, option: bool | str | PathLike[str]
) -> None:
    """Have the error of a start say what those workers were at that have a rank, if that is wanted."""

    def made(within: Where, why: str) -> Diagnosis:
        made_at = time.time()
        workers = {info.rank: own for info, own in zip(subjects.ranks, subjects.facts, strict=True)}
        return make(name, subjects, examine(workers, {}, ALL, SOON_S), why, made_at, within)

    diagnoses = begin(option, made) if subjects.ranks else None
    if diagnoses is not None:
        diagnoses.tell(error, name)


def _bare(found: Findings, forms: Sequence[tuple[str, str]]) -> Findings:
    """What was found, without the values of secrets."""
    missing = {part: without(why, forms) for part, why in found.missing.items()}
    stacks, output = without(found.stacks, forms), without(found.output, forms)
    return replace(found, stacks=stacks, output=output, missing=missing)
