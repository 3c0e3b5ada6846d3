"""The inline metadata of scripts, as PEP 723 has it."""

import pytest

from raycrew.venv_manager._spec.uv_settings import inline_metadata
from raycrew.venv_manager.errors import SpecError


def script(folder, *lines):
    path = folder / "job.py"
    path.write_text("#!/usr/bin/env python\n" + "".join(f"{line}\n" for line in lines) + "import demo\n")
    return path


def test_each_line_is_read_without_its_mark(tmp_path):
    lines = [
        "# /// script", "# dependencies = [", "#   'demo',", "# ]", "#", "# [tool.uv]",
        '# text = """', "#   two spaces", "#", '# """', "# ///",
    ]  # fmt: skip
    found = inline_metadata(script(tmp_path, *lines))
    assert found == {"dependencies": ["demo"], "tool": {"uv": {"text": "  two spaces\n\n"}}}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no complete block"),
        (["# /// script", "# dependencies = []"], "no complete block"),
        (["# /// script", "# dependencies = [", "# ///"], "cannot be read"),
    ],
)
def test_a_script_without_metadata_that_can_be_read_is_refused(tmp_path, lines, why):
    with pytest.raises(SpecError, match=f"job.py.*{why}|{why}.*job.py"):
        inline_metadata(script(tmp_path, *lines))
