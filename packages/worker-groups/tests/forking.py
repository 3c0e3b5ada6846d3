"""Programs whose driver forks, in a process of their own."""

import os
import subprocess
import sys
import textwrap


def assert_ends_well(program, *arguments):
    """Run a program that prints "end" as its last word and only one, and ends without an error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
