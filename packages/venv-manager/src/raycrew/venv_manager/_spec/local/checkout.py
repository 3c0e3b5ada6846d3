"""What git counts of a folder: what is committed or could be, not what it is told to ignore."""

import os
import shutil
import subprocess
from pathlib import Path

from raycrew.venv_manager.errors import SpecError

_DEADLINE_S = 60.0


def counted_by_git(folder: str) -> list[tuple[str, bool]] | None:
    """Paths below a folder, sorted, each with whether it is tracked; None where git does not count any."""
    rows = _listed(folder, "-t", "-c", "-o")
    if not rows:  # not a checkout after all, or one that git ignores as a whole
        return None
    return sorted({row[2:].rstrip("/"): row[0] != "?" for row in rows}.items())


def files_of_git(folder: str) -> list[str]:
    """Paths below a folder that git counts."""
    return [name for name, _ in counted_by_git(folder) or ()]


def ignored_by_git(folder: str) -> list[str]:
    """What git is told to ignore below a folder, sorted: files, and folders (with a slash) as a whole."""
    return sorted(_listed(folder, "-o", "-i", "--directory"))


def commit_of_git(folder: str) -> str:
    """The commit that a checkout is at; empty where there is none."""
    return os.fsdecode(_asked(folder, "rev-parse", "-q", "--verify", "HEAD")).strip()


def tags_of_git(folder: str) -> str:
    """The tags of a repository, each with what it names."""
    return os.fsdecode(_asked(folder, "for-each-ref", "--format=%(refname) %(objectname)", "refs/tags"))


def _listed(folder: str, *flags: str) -> list[str]:
    rows = _asked(folder, "ls-files", "-z", "--exclude-standard", *flags).split(b"\0")
    return [os.fsdecode(row) for row in rows if row]


def _asked(folder: str, *words: str) -> bytes:
    above = Path(folder).absolute()
    git = shutil.which("git")
    if git is None or not any((place / ".git").exists() for place in (above, *above.parents)):
        return b""
    line = [git, "-C", folder, "-c", "core.fsmonitor=false", *words]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(line, capture_output=True, env=environ, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SpecError(f"git did not tell about {folder} within {_DEADLINE_S:g} s") from error
    return b"" if done.returncode else done.stdout
