"""The pages keep up with the packages: errors that they explain, figures that they draw."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from draw_benchmarks import stale

DOCS = Path(__file__).parent
PACKAGES = ("cluster-core", "worker-groups", "tensor-transport", "venv-manager")


def public_errors(package: str) -> Iterator[str]:
    """Each error class that a package hands out."""
    module = importlib.import_module(f"raycrew.{package.replace('-', '_')}")
    errors = importlib.import_module(f"{module.__name__}.errors")
    for name, found in {**vars(errors), **{name: getattr(module, name) for name in module.__all__}}.items():
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
