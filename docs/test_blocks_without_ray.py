"""Every Python block of the pages that start no Ray runs.

They share one process, as most of their time is that of imports.
"""

import json
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
from blocks import ALONE, SCRIPTS, run


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each page raised, if anything."""
    folder = tmp_path_factory.mktemp("pages")
    run([__file__, str(folder / "outcomes.json")], folder)
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.parametrize("page", ALONE)
def test_blocks_run_without_ray(page: str, outcomes: Mapping[str, str]) -> None:
    assert not outcomes[page], outcomes[page]


def run_alone(page: str, folder: Path) -> str:
    """Run a page's script in this process as the main module; gives the traceback of what it raised."""
    path = folder / f"{page.replace('/', '_')}.py"
    path.write_text(SCRIPTS[page])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a page raises is its outcome
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(json.dumps({page: run_alone(page, target.parent) for page in ALONE}))
