"""What tests of connections share."""

import tempfile

import pytest


@pytest.fixture
def short_folder():
    """A folder for sessions: below pytest's own the paths of sockets would be too long."""
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
