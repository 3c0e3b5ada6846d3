"""What git counts of a folder: what is committed or could be, not what it is told to ignore."""

import os
import shutil
import subprocess
from pathlib import Path

from raycrew.venv_manager.errors import SpecError

_DEADLINE_S = 60.0


def counted_by_git(folder: str) -> list[tuple[str, bool]] | None:
    """Paths below a folder, sorted, each with whether it is tracked; None where git does not count any."""
    above = Path(folder).absolute()
    if not any((place / ".git").exists() for place in (above, *above.parents)):
        return None
    git = shutil.which("git")
    if git is None:
        return None
    words = [
        git,
        "-C",
        folder,
        "-c",
        "core.fsmonitor=false",
        "ls-files",
        "-t",
        "-z",
        "-c",
        "-o",
        "--exclude-standard",
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(words, capture_output=True, env=environ, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SpecError(f"git did not list the files of {folder} within {_DEADLINE_S:g} s") from error
    rows = [os.fsdecode(row) for row in done.stdout.split(b"\0") if row]
    if done.returncode or not rows:  # not a checkout after all, or one that git ignores as a whole
        return None
    return sorted({row[2:].rstrip("/"): row[0] != "?" for row in rows}.items())
