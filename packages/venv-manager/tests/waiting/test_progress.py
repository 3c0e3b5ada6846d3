import io
import logging
import sys

from rich.console import Console
from rich.progress import Progress

from raycrew.venv_manager._waiting.progress import reporting


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_each_change_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO), reporting("environment abc") as report:
        for text in ("choosing", "choosing", "installing"):
            report(text)
    assert [record.getMessage().rsplit(" (", 1)[0] for record in caplog.records] == [
        "environment abc: choosing",
        "environment abc: installing",
    ]
    assert sys.stderr.getvalue() == ""


def test_on_a_terminal_one_line_changes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with reporting("environment [abc]") as report:
        report("installing [demo]")
    assert "environment [abc]" in sys.stderr.getvalue()


def test_beside_another_progress_bar_changes_are_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(console=Console(stderr=True)) as progress:
        progress.add_task("workers")
        with reporting("environment [abc]") as report:
            report("installing [demo]")
    assert "environment [abc]: installing [demo]\n" in terminal.getvalue()
