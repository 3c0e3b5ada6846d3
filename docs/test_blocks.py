"""Every Python block of the READMEs and pages runs: a page's blocks are one script.

Pages that start no Ray share one process, as most of their time is that of imports.
"""

import json
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text()))


def named(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


CLUSTERED = named([page for page in PAGES if "init_ray" in script(page)])
ALONE = named([page for page in PAGES if script(page) and "init_ray" not in script(page)])


def run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", CLUSTERED)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.py"
    path.write_text(script(ROOT / page))
    run([str(path)], tmp_path)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each page that starts no Ray raised, if anything."""
    folder = tmp_path_factory.mktemp("pages")
    run([__file__, str(folder / "outcomes.json")], folder)
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.parametrize("page", ALONE)
def test_blocks_run_without_ray(page: str, outcomes: Mapping[str, str]) -> None:
    assert not outcomes[page], outcomes[page]


def run_alone(page: str, folder: Path) -> str:
    """Run a page's script in this process as the main module; gives the traceback of what it raised."""
    path = folder / f"{page.replace('/', '_')}.py"
    path.write_text(script(ROOT / page))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a page raises is its outcome
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(json.dumps({page: run_alone(page, target.parent) for page in ALONE}))
