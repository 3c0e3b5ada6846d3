"""The pages keep up with the packages: errors that they explain, commands, figures that they draw."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import PAGES
from draw_benchmarks import stale

from raycrew.cluster_core.__main__ import main as raycrew

DOCS = Path(__file__).parent
PACKAGES = ("cluster-core", "worker-groups", "tensor-transport", "venv-manager")


def public_errors(package: str) -> Iterator[str]:
    """Each error class that a package or a part of it hands out."""
    module = importlib.import_module(f"raycrew.{package.replace('-', '_')}")
    known = {name: getattr(module, name) for name in module.__all__}
    for path in Path(str(module.__file__)).parent.glob("**/errors.py"):
        where = path.parent.relative_to(Path(str(module.__file__)).parent).parts
        if not any(part.startswith("_") for part in where):
            known |= vars(importlib.import_module(".".join([module.__name__, *where, "errors"])))
    for name, found in known.items():
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        if is_error and found.__module__.startswith("raycrew.") and not name.startswith("_"):
            yield name


def test_each_public_error_has_its_row_in_troubleshooting() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    for package in PACKAGES:
        section = page.split(f"## {package}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+Error)` \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
        assert len(rows) > 10
        assert sorted(rows) == sorted(public_errors(package))


def test_the_page_of_benchmarks_is_drawn_of_todays_results() -> None:
    assert stale() == [], "run python docs/draw_benchmarks.py"


class Help:
    """What `raycrew … --help` says."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> str:
        with pytest.raises(SystemExit):
            raycrew([*words, "--help"])
        return self._capsys.readouterr().out

    def subcommands(self, *words: str) -> list[str]:
        return re.findall(r"^    (\w+)\b", self(*words), re.MULTILINE)

    def options(self, *words: str) -> set[str]:
        return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", self(*words))) - {"--help", "--version"}


def test_each_command_and_its_options_are_in_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    told = Help(capsys)
    page = (DOCS / "reference" / "commands.md").read_text()
    commands = told.subcommands()
    assert sorted(commands) == sorted(re.findall(r"^## `raycrew (\w+)`$", page, re.MULTILINE))
    assert {"doctor", "env", "groups"} < set(commands)
    for command in commands:
        section = page.split(f"## `raycrew {command}`\n")[1].split("\n## ")[0]
        options = told.options(command)
        for sub in told.subcommands(command) if command == "env" else ():
            assert f"`{sub}" in section
            options |= told.options(command, sub)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section))
        assert options == named, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_no_page_shows_python_as_plain_text_that_nobody_runs(page: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for text in (text.replace("…", "...") for language, text in blocks if language in ("", "text")):
        with pytest.raises(SyntaxError):
            compile(text, str(page), "exec", flags)
