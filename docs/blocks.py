"""The Python blocks of the READMEs and pages: a page's blocks are one script."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(page: str) -> str:
    return "\n".join(BLOCK.findall((ROOT / page).read_text()))


SCRIPTS = {str(page.relative_to(ROOT)): script(str(page)) for page in PAGES}
CLUSTERED = [page for page, code in SCRIPTS.items() if "init_ray" in code]
ALONE = [page for page, code in SCRIPTS.items() if code and "init_ray" not in code]


def run_page(page: str, folder: Path) -> None:
    """Run a page's script in a process of its own."""
    path = folder / "page.py"
    path.write_text(SCRIPTS[page])
    run([str(path)], folder)


def run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
