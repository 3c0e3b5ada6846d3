"""What a command line writes to a terminal, whatever others have called their things."""

import subprocess
import sys

import pytest
from rich.table import Table
from rich.text import Text

from raycrew.cluster_core._command_line import terminal
from raycrew.cluster_core.commands import run

HOSTILE = "a\x1b]0;mine\x07b\x9b2J\u202e\ud800\tc\x7f"


@pytest.mark.hostile
def test_nothing_that_is_shown_steers_the_terminal(capsys):
    table = Table(title=Text(HOSTILE))
    table.add_column(Text(HOSTILE))
    table.add_row(Text(HOSTILE))
    for shown in (Text(HOSTILE), table):
        terminal.show([], shown, as_json=False)
    terminal.complain("Error", HOSTILE, as_json=False)
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert "a]0;mineb2J" in text and not set(text) & set("\x1b\x07\x9b\x7f\u202e\ud800")


@pytest.mark.hostile
def test_options_are_not_guessed_from_their_beginnings(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(["--addr", "somewhere"], "raycrew gadgets", "", lambda parser: None, lambda options: None)
    assert "--addr" in capsys.readouterr().err


PLAN = [sys.executable, "-m", "raycrew.cluster_core", "plan", "--nodes", "2x8", "--request"]


@pytest.mark.hostile
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_disk_that_is_full_is_told_in_a_word(form):
    with open("/dev/full", "w") as full:  # noqa: PTH123 - no file
        done = subprocess.run(
            [*PLAN, "1x4", *form], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1 and done.stderr.startswith("OSError: what was found could not be written")
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.hostile
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(("request_", "code"), [("1x4", 0), ("3x8", 1)])
def test_without_a_standard_output_the_exit_code_tells_what_was_found(form, request_, code):
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *PLAN, request_, *form]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (code, "")
