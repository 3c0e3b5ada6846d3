"""What a failed run of uv is told as."""

import signal

import pytest

from raycrew.venv_manager._uv.process import translated


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, "signal 35")]
)
def test_a_uv_that_a_signal_ended_is_told_with_it(number, name):
    error = translated(["uv", "pip", "install"], -number, "")
    assert f"uv pip failed: it was ended by {name} (out of memory?)" in str(error)
