"""`raycrew run` as a process, beside a cluster that a stand-in for its keeper makes up."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

KEEPER = """
import json, os, signal, sys
from pathlib import Path
asked = json.loads(sys.stdin.readline())
folder = Path(sys.argv[1])
(folder / "asked").write_text(json.dumps(asked))
if (folder / "hang").exists():
    (folder / "hanging").touch()
    sys.stdin.read()
    sys.exit()
env = {"RAY_ADDRESS": "h:1", "RAYCREW_RUN_ADDRESS": "h:1", "RAY_AUTH_TOKEN": "hush" + os.urandom(8).hex()}
answer = {"address": "h:1", "started": True, "why": "said so", "env": env}
if (folder / "refuse").exists():
    answer = {"error": {"kind": "NoClusterError", "message": "there is none", "advice": "start one"}}
print(json.dumps(answer), flush=True)
sys.stdin.read()
if (folder / "stay").exists():
    signal.alarm(120)  # Whatever becomes of the test.
    (folder / "staying").touch()
    signal.pause()
(folder / "ended").touch()
"""
COMMAND = """
import os, sys
from raycrew.cluster_core._command_line.running import keeping, run
keeping._COMMAND = (sys.executable, "-c", sys.argv[1], sys.argv[2])
sys.exit(run(sys.argv[3:]))
"""


def python(code):
    """A command that runs some Python."""
    return [sys.executable, "-c", textwrap.dedent(code)]


def words(folder, *arguments, where=""):
    """The command line of `raycrew run` with the stand-in, its marks in a folder; runs `where` first."""
    return [sys.executable, "-c", textwrap.dedent(where) + COMMAND, KEEPER, str(folder), *arguments]


def finished(folder, *arguments, **options):
    """Run it to its end."""
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(words(folder, *arguments), check=False, **options)


@contextlib.contextmanager
def running(folder, *arguments, where="", **options):
    """Run it until the block ends; yields the process."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    process = subprocess.Popen(words(folder, *arguments, where=where), **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=120)


def told(process):
    """A line of its output, without which nothing goes on."""
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return line.strip()


def is_running(pid):
    """Whether a process runs, and is no zombie."""
    try:
        return state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def state(pid):
    """R, S, T …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def kill(pid, number):
    """Send a signal."""
    os.kill(pid, signal.Signals(number))


def eventually(holds, timeout_s=60.0):
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.02)
