"""The Python blocks of the README of the generation library, for tests that run them."""

import re
import textwrap

from generation_stage import EXAMPLE


def block_with(words):
    """The only block that has some words in it."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", (EXAMPLE / "README.md").read_text(), re.M | re.S)
    (block,) = (block for block in blocks if words in block)
    assert len(blocks) == 3, "each is run by a test"
    return textwrap.dedent(block)
