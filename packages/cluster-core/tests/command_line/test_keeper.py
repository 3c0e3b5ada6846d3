"""The keeper of a cluster, as a process, beside a stand-in for `init_ray`: what it answers, and to whom."""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.hostile, pytest.mark.smoke]

KEEPER = """
import os, sys
from contextlib import contextmanager
from raycrew.cluster_core import _connection
from raycrew.cluster_core._command_line.running import keeper

class Connection:
    address, started_here = "h:1", True
    def child_env(self):
        return {}

@contextmanager
def init_ray(**options):
    BODY

_connection.init_ray = init_ray
sys.exit(keeper.main())
"""


def kept(body, *arguments):
    code = KEEPER.replace("BODY", textwrap.indent(textwrap.dedent(body), " " * 4).strip())
    command, wish = (
        [sys.executable, "-c", code, *arguments],
        json.dumps({"address": "local", "said_by": "said"}),
    )
    return subprocess.run(
        command, input=wish + "\n", capture_output=True, text=True, timeout=120, check=False
    )


def test_an_error_after_the_answer_is_written_to_nobody_elses_file(tmp_path):
    done = kept(
        """
        yield Connection()
        os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)  # It gets the number of what is closed.
        raise OSError("it does not close")
        """,
        str(tmp_path / "another"),
    )
    assert json.loads(done.stdout)["address"] == "h:1" and (tmp_path / "another").read_text() == ""
    assert done.returncode == 1 and "OSError: it does not close" in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "RuntimeError('a service does not start')",
            "no cluster was found or started: RuntimeError: a service",
        ),
        ("ValueError('it means nothing')", "it means nothing"),
    ],
)
def test_an_error_before_the_answer_is_the_answer(error, said):
    done = kept(f"raise {error}; yield")
    problem = json.loads(done.stdout)["error"]
    assert problem["message"].startswith(said) and problem["kind"] == error.partition("(")[0]
    assert done.returncode == 1 and "Traceback" not in done.stderr
