"""What Ray raises in place of a result: whose error it is, and whether it tells of a death."""

import re

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

# The second: its placement group was removed, or its node is gone, before it was placed.
DEATHS = (RayActorError, ActorUnschedulableError)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MARKS = re.compile(r"[\s|]*[~^]+")
_FRAME = re.compile(r"[\s|]*File \".*\", line \d+")


def cause_of(error: BaseException) -> tuple[BaseException, str, int | None]:
    """The worker's own exception, its traceback as text, and its process id, where Ray tells them."""
    if isinstance(error, RayTaskError):
        # The raised object is of both classes; unknown attributes are its cause's, the text is Ray's.
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return cause, without_stray_marks(_COLOURS.sub("", str(error))), vars(error).get("pid")
    return error, "", vars(error).get("pid")


def without_stray_marks(traceback: str) -> str:
    """A traceback without the marks that Python puts under lines which Ray has left out."""
    kept: list[str] = []
    is_source = False  # Of a frame: the line that a mark belongs to.
    for line in traceback.splitlines():
        if is_source or not _MARKS.fullmatch(line):
            kept.append(line)
            is_source = len(kept) > 1 and _FRAME.match(kept[-2]) is not None
    return "\n".join(kept)


def is_death(error: BaseException) -> bool:
    """Whether an error says that the actor's process is gone or can't be reached."""
    return isinstance(error, DEATHS)


def may_come_back(error: BaseException) -> bool:
    """Whether an error says no more than that the actor's process can't be reached at the moment."""
    return isinstance(error, ray.exceptions.ActorUnavailableError)
