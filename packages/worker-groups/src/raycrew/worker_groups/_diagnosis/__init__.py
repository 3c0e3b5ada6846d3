"""What all ranks of a group are at, found out with one deadline, and left as text and as JSON."""

from raycrew.worker_groups._diagnosis.asking import examine
from raycrew.worker_groups._diagnosis.diagnosis import Diagnosis, RankDiagnosis
from raycrew.worker_groups._diagnosis.group_diagnosis import GroupDiagnosis
from raycrew.worker_groups._diagnosis.making import Subjects, tell_of_start
from raycrew.worker_groups._diagnosis.parts import Found, Wanted
from raycrew.worker_groups._diagnosis.writing import check_folder

__all__ = [
    "Diagnosis",
    "Found",
    "GroupDiagnosis",
    "RankDiagnosis",
    "Subjects",
    "Wanted",
    "check_folder",
    "examine",
    "tell_of_start",
]
