"""What tests about several users of one machine share."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

OTHER = 12345  # a user id that nobody has
_AS_USER = """
import os, sys
import raycrew.venv_manager.__main__, raycrew.venv_manager.testing
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
"""


def as_user(uid, code, environ, *arguments):
    """What code prints when another user runs it; what lies in root's folders is imported before."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", _AS_USER.format(uid=uid) + textwrap.dedent(code), *map(str, arguments)],
        env=dict(environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


@contextlib.contextmanager
def using(uid, code, environ, *arguments):
    """Another user's process, once it has printed a line, until the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", _AS_USER.format(uid=uid) + textwrap.dedent(code), *map(str, arguments)],
        env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout.readline()
        yield
    finally:
        process.communicate()


def give(folder, uid):
    """Make a folder and all below it somebody else's."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)


@pytest.fixture
def open_folder():
    """A folder that every user can reach, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
