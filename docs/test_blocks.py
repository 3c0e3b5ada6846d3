"""Every Python block of the pages that start Ray runs."""

from pathlib import Path

import pytest
from blocks import CLUSTERED, run_page


@pytest.mark.parametrize("page", [page for page in CLUSTERED if not page.endswith("README.md")])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)
