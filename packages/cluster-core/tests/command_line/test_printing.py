"""What a command line writes to a terminal, whatever others have called their things."""

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
