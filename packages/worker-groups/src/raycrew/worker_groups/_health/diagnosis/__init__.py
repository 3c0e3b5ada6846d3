"""What all ranks of a group are at, found out with one deadline, and left as text and as JSON."""

from raycrew.worker_groups._health.diagnosis.asking import examine
from raycrew.worker_groups._health.diagnosis.diagnosis import Diagnosis, RankDiagnosis
from raycrew.worker_groups._health.diagnosis.from_outside import diagnose_groups
from raycrew.worker_groups._health.diagnosis.group_diagnosis import GroupDiagnosis
from raycrew.worker_groups._health.diagnosis.making import Subjects, tell_of_start
from raycrew.worker_groups._health.diagnosis.parts import Findings, Wanted
from raycrew.worker_groups._health.diagnosis.writing import check_folder

__all__ = [
    "Diagnosis",
    "Findings",
    "GroupDiagnosis",
    "RankDiagnosis",
    "Subjects",
    "Wanted",
    "check_folder",
    "diagnose_groups",
    "examine",
    "tell_of_start",
]
