"""Every Python block of the READMEs that start Ray runs, in another lane than those of the pages."""

from pathlib import Path

import pytest
from blocks import CLUSTERED, run_page


@pytest.mark.parametrize("page", [page for page in CLUSTERED if page.endswith("README.md")])
def test_blocks_of_a_readme_run(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)
