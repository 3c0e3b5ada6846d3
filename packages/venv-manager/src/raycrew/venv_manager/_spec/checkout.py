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


def _listed(folder: str, *flags: str) -> list[str]:
    above = Path(folder).absolute()
    git = shutil.which("git")
    if git is None or not any((place / ".git").exists() for place in (above, *above.parents)):
        return []
    words = [git, "-C", folder, "-c", "core.fsmonitor=false", "ls-files", "-z", "--exclude-standard", *flags]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(words, capture_output=True, env=environ, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SpecError(f"git did not list the files of {folder} within {_DEADLINE_S:g} s") from error
    return [] if done.returncode else [os.fsdecode(row) for row in done.stdout.split(b"\0") if row]
